// All strategies, and all valid combinations of sharded state and mesh axes, train bitwise equally; negative controls
// show that the comparison detects a difference.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "tests/fsdp/models.h"

namespace tessera::fsdp {
namespace {

using harness::same_bits;
using harness::train;
using harness::TrainingRecord;

TrainingSpec equality_spec(const std::string& strategy, int ranks) {
  TrainingSpec spec = base_spec(strategy, ranks, {.layers = 2});
  spec.global_batch = 5 * ranks;
  return spec;
}

class Equality : public testing::TestWithParam<int> {};

TEST_P(Equality, OneAxisStrategiesAreBitwiseEqual) {
  const TrainingRecord ddp = train(equality_spec("ddp", GetParam()));
  for (const char* name : {"zero1", "zero2", "fsdp", "shard_grad_op"})
    EXPECT_TRUE(same_bits(ddp, train(equality_spec(name, GetParam())))) << name;
}

TEST_P(Equality, HoldsWithUnevenSizesClippingAndSmallUnits) {
  TrainingSpec base = equality_spec("ddp", GetParam());
  base.model = uneven_model();
  base.seq_len = 17;
  base.engine.clip_norm = 0.5;
  base.engine.wrap = "size:30";  // norms become units of their own: fewer elements than 8 x world
  const TrainingRecord ddp = train(base);
  EXPECT_THAT(ddp.norms, testing::Each(testing::Gt(0.5)));  // clipping was active
  for (const char* name : {"zero1", "zero2", "fsdp", "hsdp"}) {
    TrainingSpec spec = base;
    if (std::string(name) == "hsdp" && GetParam() % 2 != 0) continue;
    spec.engine.strategy = strategy_named(name);
    const TrainingRecord other = train(spec);
    EXPECT_TRUE(same_bits(ddp, other)) << name;
    EXPECT_EQ(ddp.norms, other.norms) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Equality, testing::Values(1, 2, 3, 4, 5));

TEST(EqualityAcross, HsdpEqualsFsdpForPowerOfTwoReplicas) {
  for (const auto& [ranks, mesh] :
       {std::pair(4, "2x2"), std::pair(4, "4x1"), std::pair(4, "1x4"), std::pair(6, "2x3")}) {
    TrainingSpec spec = equality_spec("hsdp", ranks);
    spec.engine = engine_for("hsdp", mesh);
    EXPECT_TRUE(same_bits(train(equality_spec("fsdp", ranks)), train(spec))) << mesh;
  }
}

TEST(EqualityAcross, HoldsForLlama) {
  TrainingSpec spec = equality_spec("ddp", 3);
  spec.model = nn::preset("llama-nano");
  const TrainingRecord ddp = train(spec);
  for (const char* name : {"zero1", "zero2", "fsdp"}) {
    spec.engine = engine_for(name);
    EXPECT_TRUE(same_bits(ddp, train(spec))) << name;
  }
}

TEST(EqualityAcross, ThreadsPrefetchAndWrappingChangeNoBit) {
  const TrainingRecord base = train(equality_spec("fsdp", 2));
  TrainingSpec spec = equality_spec("fsdp", 2);
  spec.threads = 2;
  EXPECT_TRUE(same_bits(base, train(spec))) << "threads";
  for (const int prefetch : {0, 2, 100}) {
    spec = equality_spec("fsdp", 2);
    spec.engine.prefetch = prefetch;
    EXPECT_TRUE(same_bits(base, train(spec))) << "prefetch " << prefetch;
  }
  for (const bool reshard : {false, true}) {
    spec = equality_spec("fsdp", 2);
    spec.engine.reshard_after_forward = reshard;
    EXPECT_TRUE(same_bits(base, train(spec))) << "reshard " << reshard;
  }
  for (const char* wrap : {"none", "block;wpe", "h.0.attn;h.1+ln_f"}) {
    spec = equality_spec("fsdp", 2);
    spec.engine.wrap = wrap;
    EXPECT_TRUE(same_bits(base, train(spec))) << wrap;
  }
}

TEST(EqualityAcross, HoldsForEveryOptimizer) {
  using Kind = nn::OptimizerConfig::Kind;
  const nn::OptimizerConfig configs[] = {{.kind = Kind::sgd, .weight_decay = 0.1, .momentum = 0.9, .nesterov = true},
                                         {.kind = Kind::adam, .weight_decay = 0.1, .amsgrad = true},
                                         {.kind = Kind::sgd}};
  for (const nn::OptimizerConfig& config : configs) {
    TrainingSpec spec = equality_spec("ddp", 3);
    spec.engine.optimizer = config;
    const TrainingRecord ddp = train(spec);
    spec.engine.strategy = strategy_named("fsdp");
    EXPECT_TRUE(same_bits(ddp, train(spec)));
  }
}

/// One update has all parameters of a unit. Three ranks divide them between elements of a parameter.
TEST(EqualityAcross, NormsAndBiasesOfAUnitDoNotDecay) {
  for (const int ranks : {1, 3}) {
    TrainingSpec spec = equality_spec("fsdp", ranks);
    spec.steps = 1;
    spec.engine.optimizer = {.kind = nn::OptimizerConfig::Kind::sgd, .weight_decay = 0};
    const TrainingRecord without = train(spec);
    spec.engine.optimizer.weight_decay = 0.5;
    const TrainingRecord with = train(spec);
    for (const auto& [name, values] : with.parameters) {
      const bool decays = !name.ends_with(".bias") && name.find("ln_") == std::string::npos;
      EXPECT_EQ(values != without.parameters.at(name), decays) << name;
    }
  }
}

/// Negative control: the comparison detects one flipped bit, and a different seed.
TEST(EqualityAcross, DetectsFlippedBit) {
  const TrainingRecord base = train(equality_spec("ddp", 2));
  TrainingRecord flipped = base;
  auto& values = flipped.parameters.begin()->second;
  std::uint32_t bits;
  std::memcpy(&bits, &values[values.size() / 2], 4);
  bits ^= 1;
  std::memcpy(&values[values.size() / 2], &bits, 4);
  EXPECT_FALSE(same_bits(base, flipped));
  TrainingSpec seeded = equality_spec("ddp", 2);
  seeded.seed = 1;
  EXPECT_FALSE(same_bits(base, train(seeded)));
}

/// A strategy with a wrong divisor must not pass as equal: AdamW hides a wrong scale, so SGD is used.
TEST(EqualityAcross, GradientsOfOneRankEqualThoseOfFour) {
  for (const auto kind : {nn::OptimizerConfig::Kind::sgd, nn::OptimizerConfig::Kind::adamw}) {
    TrainingSpec spec = equality_spec("fsdp", 1);
    spec.global_batch = 12;
    spec.steps = 20;
    spec.drains = true;  // the norms of all steps
    spec.lr = kind == nn::OptimizerConfig::Kind::sgd ? 0.1 : 1e-3;
    spec.engine.optimizer.kind = kind;
    spec.engine.measure_norm = true;
    const TrainingRecord one = train(spec);
    spec.ranks = 4;
    const TrainingRecord four = train(spec);
    for (std::size_t i = 0; i < one.losses.size(); ++i) {
      EXPECT_NEAR(one.losses[i], four.losses[i], 3e-6 * one.losses[i]) << i;
      EXPECT_NEAR(one.norms[i], four.norms[i], 3e-6 * one.norms[i]) << i;
    }
  }
}

/// Streams that run their work as late as possible, only when something waits for it, give the same bits: no dependency
/// is missing.
TEST(LazyStreams, AreBitwiseEqual) {
  for (const char* name : {"ddp", "zero1", "zero2", "fsdp"}) {
    TrainingSpec spec = equality_spec(name, 2);
    spec.engine.clip_norm = 1.0;
    const TrainingRecord eager = train(spec);
    spec.lazy_streams = true;
    EXPECT_TRUE(same_bits(eager, train(spec))) << name;
  }
}

#ifndef __SANITIZE_THREAD__  // which rightly reports the data race of this control

/// Reduces without waiting for the stream that computes the gradients.
class Hasty final : public CollectivePlugin {
 public:
  WorkChain run(const CollectiveCall& call) override {
    WorkChain works;
    for (const FlatTransfer& t : call.transfers) works.add(call.channel.reduce_scatter(t.in, t.out, call.op, {}));
    return works;
  }
};

/// Negative control of the test above: a missing dependency is detected.
TEST(LazyStreams, DetectMissingDependency) {
  TrainingSpec spec = equality_spec("zero2", 2);
  spec.lazy_streams = true;
  const TrainingRecord right = train(spec);
  spec.engine.collectives.add(comm::OpKind::reduce_scatter, "hasty", [] { return std::make_unique<Hasty>(); });
  spec.engine.strategy.reduce_scatter = "hasty";
  EXPECT_FALSE(same_bits(right, train(spec)));
}

#endif

// --- every combination of sharded state and mesh axes

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

TrainingSpec combination_spec(const Strategy& strategy) {
  TrainingSpec spec = base_spec("fsdp", 4, {.layers = 2, .mesh = "2x2"});
  spec.lazy_streams = true;
  spec.engine.strategy = strategy;
  spec.engine.poison = true;
  return spec;
}

class Combinations : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  Strategy strategy_ =
      unit_strategy(static_cast<Depth>(std::get<0>(GetParam())), static_cast<Depth>(std::get<1>(GetParam())));
};
INSTANTIATE_TEST_SUITE_P(All, Combinations, testing::Combine(testing::Range(0, 5), testing::Range(0, 5)));

TEST_P(Combinations, TrainOrAreRejectedWithReason) {
  const auto [replicate, shard] = GetParam();
  const TrainingSpec spec = combination_spec(strategy_);
  if (replicate > shard && shard != nothing && replicate > optimizer) {  // replicas are the outer axis
    EXPECT_THROW(validate(strategy_, *spec.engine.mesh), base::Unsupported);
    EXPECT_THROW(train(spec), base::Unsupported);
    return;
  }
  EXPECT_NO_THROW(validate(strategy_, *spec.engine.mesh));
  const TrainingRecord own = train(spec);
  const TrainingRecord fsdp = train(combination_spec(unit_strategy(nothing, after_forward)));
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
    context_ = &nn_context(setup.runtime);
    buffers_ = &setup.buffers;
  }
  WorkChain run(const CollectiveCall& call) override {
    WorkChain works;
    std::vector<std::pair<comm::View, std::shared_ptr<Lease>>> come;
    for (const FlatTransfer& t : call.transfers) {
      const auto room = std::make_shared<Lease>(
          buffers_->acquire(t.out.bytes(), std::string(call.options.label), *call.options.after));
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

TEST_P(Combinations, GatherAxesInOrder) {
  const auto [replicate, shard] = GetParam();
  if (replicate > shard && shard != nothing && replicate > optimizer) return;  // rejected, see above
  TrainingSpec spec = combination_spec(strategy_);
  const TrainingRecord plain = train(spec);
  spec.engine.collectives.add(comm::OpKind::all_gather, "late", [] { return std::make_unique<Late>(); });
  spec.engine.strategy.all_gather = "late";
  EXPECT_TRUE(same_bits(plain, train(spec)));
}

/// Negative control: one more sharded kind of state transfers other bytes.
TEST(Combinations, DetectsBytesOfOtherCombination) {
  const TrainingRecord own = train(combination_spec(unit_strategy(optimizer, after_forward)));
  const CommunicationFormula other =
      communication_formula(unit_strategy(nothing, after_forward), own.mesh, own.unit_sizes);
  EXPECT_NE(harness::bytes_per_step(own.all_later, 2), other.bytes);
}

}  // namespace
}  // namespace tessera::fsdp
