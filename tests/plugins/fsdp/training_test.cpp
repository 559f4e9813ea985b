// Trainings with an external plug-in: bitwise equal results, the bytes that its cost predicts, checkpoints.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/fsdp/checkpoint.h"
#include "tests/fsdp/checkpoint_support.h"
#include "tests/harness/training.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::fsdp {
namespace {

using harness::bytes_per_step;
using harness::calls_per_step;
using harness::same_bits;
using harness::train;
using harness::TrainingRecord;
using harness::TrainingSpec;
using testing::HasSubstr;

const std::string kLab = TESSERA_LAB;

TrainingSpec lab_spec(const std::string& strategy, int ranks, const std::string& mesh = "") {
  TrainingSpec spec;
  spec.ranks = ranks;
  spec.global_batch = 2 * ranks;
  spec.engine = harness::engine_for("fsdp", mesh);
  spec.engine.strategy = parse_strategy(strategy, spec.engine.collectives);
  if (mesh.empty()) spec.engine.mesh = default_mesh(spec.engine.strategy, ranks, ranks);
  return spec;
}

void expect_formula(const TrainingSpec& spec, const TrainingRecord& record) {
  const CommunicationFormula formula = communication_formula(record.strategy, record.mesh, record.unit_sizes);
  EXPECT_EQ(calls_per_step(record.all_later, spec.steps - 1), formula.calls);
  EXPECT_EQ(bytes_per_step(record.all_later, spec.steps - 1), formula.bytes);
}

TEST(Lab, StrategyIsBitwiseEqualToFsdp) {
  for (const auto& [ranks, mesh] : {std::pair(1, ""), std::pair(4, "2x2"), std::pair(4, "4x1"), std::pair(6, "2x3")}) {
    TrainingSpec spec = lab_spec(kLab + ":hfsdp", ranks, mesh);
    spec.engine.poison = true;
    spec.lazy_streams = true;
    const TrainingRecord own = train(spec);
    TrainingSpec fsdp = lab_spec("fsdp", ranks);
    EXPECT_TRUE(same_bits(own, train(fsdp))) << mesh;
    fsdp.seed = 1;  // negative control
    EXPECT_FALSE(same_bits(own, train(fsdp))) << mesh;
    expect_formula(spec, own);
  }
}

/// Shards parameters within a replica, and gradients and optimizer state over all ranks.
TEST(Lab, StrategyHoldsStatedState) {
  const TrainingSpec spec = lab_spec(kLab + ":hfsdp", 4);
  const TrainingRecord own = train(spec), hsdp = train(lab_spec("hsdp", 4)), fsdp = train(lab_spec("fsdp", 4));
  ASSERT_EQ(own.mesh.size_of(kReplicateAxis), 2) << "it wants two axes";
  for (std::size_t rank = 0; rank < 4; ++rank) {
    const auto& [parameter, gradient, optimizer] = own.model_state[rank];
    EXPECT_EQ(parameter, hsdp.model_state[rank][0]);
    EXPECT_EQ(gradient, fsdp.model_state[rank][1]);
    EXPECT_EQ(optimizer, fsdp.model_state[rank][2]);
    EXPECT_GT(hsdp.model_state[rank][2], optimizer);
  }
}

TEST(Lab, GatherSendsHalfOfBytes) {
  for (const int ranks : {2, 3}) {
    TrainingSpec spec = lab_spec("fsdp+" + kLab + ":f16", ranks);
    spec.engine.poison = true;
    spec.lazy_streams = true;
    const TrainingRecord half = train(spec), plain = train(lab_spec("fsdp", ranks));
    expect_formula(spec, half);
    EXPECT_EQ(half.all_later.all_gather.bytes_sent * 2, plain.all_later.all_gather.bytes_sent);
    EXPECT_EQ(half.all_later.reduce_scatter.bytes_sent, plain.all_later.reduce_scatter.bytes_sent);
    EXPECT_FALSE(same_bits(half, plain)) << "values were rounded";
    for (std::size_t step = 0; step < half.losses.size(); ++step)
      EXPECT_NEAR(half.losses[step], plain.losses[step], 2e-3);
  }
}

/// A lossy all_gather must not overwrite the only copy of the parameters: the engine checks its capabilities.
TEST(Lab, GatherThatLosesUpdatesIsRejected) {
  const TrainingSpec spec = lab_spec("zero1+" + kLab + ":f16", 2);
  try {
    train(spec);
    FAIL();
  } catch (const base::InvalidUsage& error) {
    EXPECT_THAT(error.what(), HasSubstr("all_gather by " + kLab + ":f16: it rounds"));
  }
}

TEST(Lab, ResumedRunEqualsUninterrupted) {
  const nn::test::TemporaryDirectory directory;
  TrainingSpec spec = lab_spec(kLab + ":hfsdp", 4);
  spec.steps = 4;
  const TrainingRecord whole = train(spec);
  train(saving(spec, directory.path(), 1));
  EXPECT_EQ(Checkpoint(directory.path()).strategy(), kLab + ":hfsdp");
  for (const std::string& strategy : {kLab + ":hfsdp", std::string("fsdp")}) {
    TrainingSpec resumed = lab_spec(strategy, 4);
    resumed.steps = 4;
    EXPECT_EQ(train(resuming(resumed, directory.path(), 2)).parameters, whole.parameters) << strategy;
  }
}

}  // namespace
}  // namespace tessera::fsdp
