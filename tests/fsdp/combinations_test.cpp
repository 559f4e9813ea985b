// A strategy is data: every valid combination of sharded state and mesh axes trains, at the cost of the formulas.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/harness/training.h"

namespace tessera::fsdp {
namespace {

using harness::same_bits;
using harness::train;
using harness::TrainingRecord;
using harness::TrainingSpec;

/// How much an axis shards: each kind of state may be sharded only if the next one is.
enum Depth { nothing, optimizer, gradient, at_rest, after_forward };

Strategy unit_strategy(Depth replicate, Depth shard) {
  Strategy s{.name = "own"};
  for (const auto& [axis, depth] : {std::pair(kReplicateAxis, replicate), std::pair(kShardAxis, shard)}) {
    if (depth >= optimizer) s.optimizer.insert(axis);
    if (depth >= gradient) s.gradient.insert(axis);
    if (depth >= at_rest) s.param_at_rest.insert(axis);
    if (depth >= after_forward) s.param_after_forward.insert(axis);
  }
  return s;
}

TrainingSpec spec_for(const Strategy& strategy) {
  TrainingSpec spec;
  spec.ranks = 4;
  spec.global_batch = 8;
  spec.lazy_streams = true;
  spec.engine.strategy = strategy;
  spec.engine.mesh = MeshShape::grid(2, 2);
  spec.engine.poison = true;
  return spec;
}

class Combinations : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  Strategy strategy_ =
      unit_strategy(static_cast<Depth>(std::get<0>(GetParam())), static_cast<Depth>(std::get<1>(GetParam())));
};
INSTANTIATE_TEST_SUITE_P(All, Combinations, testing::Combine(testing::Range(0, 5), testing::Range(0, 5)));

TEST_P(Combinations, TrainOrAreRefusedWithTheReason) {
  const auto [replicate, shard] = GetParam();
  const TrainingSpec spec = spec_for(strategy_);
  if (replicate > shard && shard != nothing && replicate > optimizer) {  // replicas are the outer axis
    EXPECT_THROW(validate(strategy_, *spec.engine.mesh), base::Unsupported);
    EXPECT_THROW(train(spec), base::Unsupported);
    return;
  }
  EXPECT_NO_THROW(validate(strategy_, *spec.engine.mesh));
  const TrainingRecord own = train(spec);
  const TrainingRecord fsdp = train(spec_for(unit_strategy(nothing, after_forward)));
  // Sums follow one binary tree where shards are added before replicas; gradients are reduce-scattered before they are
  // all-reduced.
  if (replicate == nothing || shard != nothing) {
    EXPECT_TRUE(same_bits(own, fsdp));
  } else {
    for (std::size_t step = 0; step < own.losses.size(); ++step) EXPECT_NEAR(own.losses[step], fsdp.losses[step], 1e-4);
  }
  const CommunicationFormula formula = communication_formula(own.strategy, own.mesh, own.unit_sizes);
  EXPECT_EQ(harness::calls_per_step(own.all_later, spec.steps - 1), formula.calls);
  EXPECT_EQ(harness::bytes_per_step(own.all_later, spec.steps - 1), formula.bytes);
}

/// Gathers into a leased buffer and copies to the output only when the work is waited on.
class Late final : public CollectivePlugin {
 public:
  void prepare(const CollectiveSetup& setup) override {
    context_ = &setup.context;
    buffers_ = &setup.buffers;
  }
  WorkChain run(const CollectiveCall& call) override {
    WorkChain works;
    std::vector<std::pair<comm::View, std::shared_ptr<Lease>>> come;
    for (const FlatTransfer& t : call.transfers) {
      const auto room =
          std::make_shared<Lease>(buffers_->acquire(t.out.bytes(), std::string(call.options.label), *call.options.after));
      works.add(call.channel.all_gather(t.in, {room->data(), t.out.count, t.out.dtype, t.out.device}, call.options));
      come.emplace_back(t.out, room);
    }
    works.then([this, come](Stream& stream) {
      for (const auto& [out, room] : come) {
        context_->runtime().copy(stream, base::CopyDirection::device_to_device, out.data, room->data(), out.bytes());
        room->release(stream.record());
      }
      return WorkChain();
    });
    return works;
  }

 private:
  nn::Context* context_ = nullptr;
  LeasePool* buffers_ = nullptr;
};

TEST_P(Combinations, GatherOverOneAxisAfterTheOther) {
  const auto [replicate, shard] = GetParam();
  if (replicate > shard && shard != nothing && replicate > optimizer) return;  // rejected, see above
  TrainingSpec spec = spec_for(strategy_);
  const TrainingRecord plain = train(spec);
  spec.engine.collectives.add(comm::OpKind::all_gather, "late", [] { return std::make_unique<Late>(); });
  spec.engine.strategy.all_gather = "late";
  EXPECT_TRUE(same_bits(plain, train(spec)));
}

/// Negative control: one more sharded kind of state transfers other bytes.
TEST(CombinationsControl, AnotherCombinationCostsOtherwise) {
  const TrainingRecord own = train(spec_for(unit_strategy(optimizer, after_forward)));
  const CommunicationFormula other =
      communication_formula(unit_strategy(nothing, after_forward), own.mesh, own.unit_sizes);
  EXPECT_NE(harness::bytes_per_step(own.all_later, 2), other.bytes);
}

}  // namespace
}  // namespace tessera::fsdp
