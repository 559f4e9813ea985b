// CPU offload: bitwise equal to a run without it, memory and bytes as by the formulas, and no host waits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/fsdp/training_specs.h"
#include "tests/harness/guarded_device.h"

namespace tessera::fsdp {
namespace {

using base::DType;
using base::MemoryCategory;
using harness::same_bits;
using harness::train;
using harness::TrainingRecord;
using testing::HasSubstr;

struct Case {
  const char* strategy;
  int ranks;
  DType dtype = DType::f32;
  std::optional<DType> reduce = {};
  Precision precision() const { return make_precision(dtype, reduce); }
};

std::string name_of(const Case& c) {
  return std::string(c.strategy) + "_" + std::to_string(c.ranks) + "_" + std::string(base::name_of(c.dtype)) +
         (c.reduce ? "_" + std::string(base::name_of(*c.reduce)) : "");
}

TrainingSpec offload_spec(const Case& c, bool offload, harness::GuardedOptions device = {.lazy = true}) {
  TrainingSpec spec =
      base_spec(c.strategy, c.ranks, {.layers = 2, .clip_norm = 0.5, .dtype = c.dtype, .reduce_dtype = c.reduce});
  spec.global_batch = 4;
  spec.engine.poison = true;
  spec.engine.cpu_offload = offload;
  spec.engine.offload_chunk_elements = 5001;  // several chunks per unit, at odd offsets
  spec.runtime = harness::make_guarded_device(device);
  return spec;
}

class CpuOffload : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Strategies, CpuOffload,
                         testing::Values(Case{"zero1", 1}, Case{"zero1", 2}, Case{"zero2", 1}, Case{"zero2", 2},
                                         Case{"fsdp", 1}, Case{"fsdp", 2}, Case{"fsdp", 4}, Case{"shard_grad_op", 2},
                                         Case{"hsdp", 4}, Case{"zero1", 2, DType::bf16},
                                         Case{"zero2", 2, DType::bf16, DType::f32}, Case{"fsdp", 1, DType::bf16},
                                         Case{"fsdp", 2, DType::bf16}, Case{"fsdp", 2, DType::bf16, DType::f32},
                                         Case{"hsdp", 4, DType::bf16, DType::f32}),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(CpuOffload, IsBitwiseEqual) {
  EXPECT_TRUE(same_bits(train(offload_spec(GetParam(), true)), train(offload_spec(GetParam(), false))));
}

TEST_P(CpuOffload, DeviceBytesEqualFormula) {
  const TrainingSpec spec = offload_spec(GetParam(), true);
  const TrainingRecord record = train(spec);
  std::int64_t padded = 0;
  for (const UnitSize& unit : record.unit_sizes) padded += unit.padded;
  const ModelStateBytes all = model_state_formula(spec.engine.strategy, record.mesh, padded, 2, GetParam().precision());
  const ModelStateBytes state = with_offload(spec.engine.strategy, all);
  EXPECT_EQ(state.parameter + state.gradient + state.optimizer + state.offloaded,
            all.parameter + all.gradient + all.optimizer);
  for (std::size_t rank = 0; rank < record.memory_trackers.size(); ++rank) {
    EXPECT_THAT(record.model_state[rank], testing::ElementsAre(state.parameter, state.gradient, state.optimizer));
    EXPECT_EQ(record.memory_trackers[rank].now_of(MemoryCategory::offloaded), state.offloaded);
  }
  // The negative control: without offload, all of that is on the device.
  const TrainingRecord plain = train(offload_spec(GetParam(), false));
  EXPECT_THAT(plain.model_state[0], testing::ElementsAre(all.parameter, all.gradient, all.optimizer));
  EXPECT_EQ(plain.memory_trackers[0].now_of(MemoryCategory::offloaded), 0U);
}

TEST_P(CpuOffload, TransfersEqualFormulaWithoutFurtherCopies) {
  const TrainingSpec spec = offload_spec(GetParam(), true);
  const TrainingRecord record = train(spec);
  for (const UnitStats& unit : record.units) ASSERT_EQ(unit.padding, 0) << "the formula counts it";
  const OffloadBytes formula =
      offload_formula(spec.engine.strategy, record.mesh, record.unit_sizes, 2, GetParam().precision());
  const auto later = static_cast<std::uint64_t>(spec.steps - 1);
  EXPECT_EQ(record.later_offload, (OffloadBytes{formula.to_device * later, formula.to_host * later}));
  EXPECT_GT(formula.to_host, 0U);
  EXPECT_EQ(record.copied_bytes, 0U);
  EXPECT_EQ(train(offload_spec(GetParam(), false)).later_offload, OffloadBytes{}) << "the negative control";
}

TEST_P(CpuOffload, StepNeverMakesHostWait) {
  TrainingSpec spec = offload_spec(GetParam(), true);
  spec.steps = 4;
  for (const auto& steps : train(spec).waits)
    for (std::size_t step = 2; step < steps.size(); ++step) EXPECT_EQ(steps[step], harness::HostWaits{});
}

/// Negative control of the bits: one of the two copy streams skips its waits.
TEST(CpuOffload, DetectsMissingDependency) {
  const Case one{"fsdp", 1};
  const TrainingRecord right = train(offload_spec(one, true));
  for (const int stream : {2, 3})  // streams 0 and 1 belong to the communicator, which copies nothing with one rank
    EXPECT_FALSE(same_bits(train(offload_spec(one, true, {.lazy = true, .deaf_copy_stream = stream})), right))
        << stream;
  EXPECT_TRUE(same_bits(train(offload_spec(one, true, {.lazy = true, .deaf_copy_stream = 4})), right))
      << "there are two";
}

TEST(CpuOffload, ChunkSizeChangesNoBit) {
  const TrainingRecord plain = train(offload_spec({"fsdp", 2}, false));
  for (const std::int64_t chunk : {7919, 1 << 20}) {
    TrainingSpec spec = offload_spec({"fsdp", 2}, true);
    spec.engine.offload_chunk_elements = chunk;
    EXPECT_TRUE(same_bits(train(spec), plain)) << chunk;
  }
}

TEST(CpuOffload, SupportsEveryOptimizer) {
  using Kind = nn::OptimizerConfig::Kind;
  for (const nn::OptimizerConfig& config :
       {nn::OptimizerConfig{.kind = Kind::sgd}, nn::OptimizerConfig{.kind = Kind::sgd, .momentum = 0.9},
        nn::OptimizerConfig{.kind = Kind::adam, .amsgrad = true}}) {
    TrainingSpec spec = offload_spec({"fsdp", 2}, true), plain = offload_spec({"fsdp", 2}, false);
    spec.engine.optimizer = plain.engine.optimizer = config;
    EXPECT_TRUE(same_bits(train(spec), train(plain)));
  }
}

/// A training that loads values from a program while copies and gathers are in flight.
TrainingRecord train_with_values_from_outside(TrainingSpec spec) {
  spec.after_step = [](int, int step, Engine& engine, nn::CausalModel&) {
    if (step == 0)
      engine.state().load([](const fsdp::Parameter& parameter, nn::ElementRange range, float* out) {
        for (std::int64_t i = range.begin; i < range.end; ++i)
          out[i - range.begin] = 0.02F * static_cast<float>((i * 7 + parameter.count()) % 13 - 6);
      });
    if (step == 1) engine.initialize(5);
  };
  return train(spec);
}

TEST(CpuOffload, LoadsValuesDuringTraining) {
  for (const Case& c : {Case{"fsdp", 1}, Case{"fsdp", 2}, Case{"zero2", 2}, Case{"fsdp", 2, DType::bf16, DType::f32},
                        Case{"zero1", 2, DType::bf16}}) {
    const TrainingRecord with = train_with_values_from_outside(offload_spec(c, true));
    TrainingSpec host = offload_spec(c, false);
    host.runtime = nullptr;
    EXPECT_TRUE(same_bits(with, train_with_values_from_outside(offload_spec(c, false)))) << name_of(c);
    EXPECT_TRUE(same_bits(with, train_with_values_from_outside(host))) << name_of(c);
    EXPECT_FALSE(same_bits(with, train(offload_spec(c, true)))) << "the values have changed something";
  }
}

std::string refusal(const TrainingSpec& spec) {
  try {
    train(spec);
  } catch (const base::Error& error) {
    return error.what();
  }
  return "trained";
}

TEST(CpuOffload, ErrorsStateReason) {
  EXPECT_THAT(refusal(offload_spec({"ddp", 2}, true)), HasSubstr("strategy ddp shards nothing"));
  TrainingSpec host = offload_spec({"fsdp", 2}, true);
  host.runtime = nullptr;
  EXPECT_THAT(refusal(host), HasSubstr("device cpu already uses host memory"));
  TrainingSpec chunks = offload_spec({"fsdp", 2}, true);
  chunks.engine.offload_chunk_elements = 0;
  EXPECT_THAT(refusal(chunks), HasSubstr("offload_chunk_elements: 0 elements"));
  TrainingSpec both = offload_spec({"hsdp", 4}, true);
  both.engine.strategy.optimizer = {kReplicateAxis, kShardAxis};
  EXPECT_THAT(refusal(both), HasSubstr("gathers parameters over axis replicate after the step"));
  both.engine.cpu_offload = false;
  EXPECT_EQ(refusal(both), "trained");
}

}  // namespace
}  // namespace tessera::fsdp
