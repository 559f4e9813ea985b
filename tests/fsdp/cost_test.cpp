// Cost of a step: calls, bytes, copies, memory, as counted by backend and memory tracker, against the formulas, and
// these against the table in the documentation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/slow_link/slow_link.h"
#include "tessera/fsdp/formulas.h"
#include "tests/fsdp/training_specs.h"

namespace tessera::fsdp {
namespace {

using base::MemoryCategory;
using harness::train;
using harness::TrainingRecord;

const SpecOptions kFourBlocks = {.layers = 4};

struct Case {
  const char* strategy;
  int ranks;
  const char* mesh;
};

class Cost : public testing::TestWithParam<Case> {
 protected:
  static TrainingSpec spec() {
    return base_spec(GetParam().strategy, GetParam().ranks, {.layers = 4, .mesh = GetParam().mesh});
  }
};

TEST_P(Cost, CallsAndBytesEqualFormula) {
  const TrainingSpec given = spec();
  const TrainingRecord record = train(given);
  const auto formula = communication_formula(given.engine.strategy, record.mesh, record.unit_sizes);
  const int steps = given.steps - 1;
  for (const EngineTraffic& rank : record.later_by_rank) {
    EXPECT_EQ(harness::calls_per_step(rank, steps), formula.calls);
    EXPECT_EQ(harness::bytes_per_step(rank, steps), formula.bytes);
    EXPECT_EQ(rank.all_gather.bytes_sent % static_cast<std::uint64_t>(steps), 0u);
  }
}

TEST_P(Cost, ModelStateEqualsZeroTable) {
  const TrainingSpec given = spec();
  const TrainingRecord record = train(given);
  std::int64_t padded = 0;
  for (const UnitSize& unit : record.unit_sizes) padded += unit.padded;
  const ModelStateBytes formula = model_state_formula(given.engine.strategy, record.mesh, padded, 2);
  for (const auto& state : record.model_state) {
    EXPECT_EQ(state[0], formula.parameter);
    EXPECT_EQ(state[1], formula.gradient);
    EXPECT_EQ(state[2], formula.optimizer);
  }
}

TEST_P(Cost, PeaksStayWithinBounds) {
  for (const int prefetch : {0, 1, 2}) {
    TrainingSpec given = spec();
    given.engine.prefetch = prefetch;
    const TrainingRecord record = train(given);
    const PeakBounds bounds =
        peak_formula(given.engine.strategy, record.mesh, record.unit_sizes, {.prefetch = prefetch});
    for (const auto& memory_tracker : record.memory_trackers) {
      EXPECT_LE(memory_tracker.peak_of(MemoryCategory::unsharded_parameter), bounds.unsharded_parameter);
      EXPECT_LE(memory_tracker.peak_of(MemoryCategory::unsharded_gradient), bounds.unsharded_gradient);
      // The bound is tight: the peak equals it.
      EXPECT_EQ(memory_tracker.peak_of(MemoryCategory::unsharded_gradient), bounds.unsharded_gradient);
    }
  }
}

TEST_P(Cost, NothingIsCopied) { EXPECT_EQ(train(spec()).copied_bytes, 0u); }

INSTANTIATE_TEST_SUITE_P(Strategies, Cost,
                         testing::Values(Case{"ddp", 2, ""}, Case{"ddp", 3, ""}, Case{"zero1", 2, ""},
                                         Case{"zero1", 5, ""}, Case{"zero2", 3, ""}, Case{"zero2", 4, ""},
                                         Case{"fsdp", 2, ""}, Case{"fsdp", 3, ""}, Case{"fsdp", 4, ""},
                                         Case{"hsdp", 4, "2x2"}, Case{"hsdp", 6, "2x3"}, Case{"hsdp", 6, "3x2"},
                                         Case{"shard_grad_op", 3, ""}),
                         [](const auto& test) {
                           std::string name = test.param.strategy + std::to_string(test.param.ranks) + test.param.mesh;
                           std::erase_if(name, [](char c) { return c == '_'; });
                           return name;
                         });

TEST(Cost, OneRankCallsNoCollective) {
  for (const std::string& name : strategy_names()) {
    TrainingSpec spec = base_spec(name, 1, kFourBlocks);
    spec.engine.clip_norm = 1.0;
    const TrainingRecord record = train(spec);
    const EngineTraffic& t = record.all_later;
    EXPECT_EQ(t.all_gather.calls + t.reduce_scatter.calls + t.all_reduce.calls + t.control.calls, 0u) << name;
    EXPECT_EQ(record.memory_trackers[0].peak_of(MemoryCategory::unsharded_parameter), 0u) << name;
  }
}

TEST(UnitPeak, EqualsLeasedBytes) {
  for (const auto& [name, reduce, factor] : {std::tuple("ddp", false, 0), std::tuple("zero2", false, 1),
                                             std::tuple("fsdp", false, 2), std::tuple("fsdp", true, 4)}) {
    TrainingSpec spec = base_spec(name, 2, kFourBlocks);
    if (reduce) spec.dtype = base::DType::bf16;
    if (reduce) spec.engine.reduce_dtype = base::DType::f32;
    // Parameters and gradients. In bf16 with f32 gradients both forms of the gradients; the parameters are released by
    // then.
    const std::size_t element = reduce ? 2 : 4;
    for (const UnitStats& unit : train(spec).units) {
      const auto padded = static_cast<std::size_t>(unit.elements + unit.padding);
      EXPECT_EQ(unit.peak_bytes, padded * (reduce ? 6 : element * static_cast<std::size_t>(factor))) << name;
    }
  }
}

/// A frozen unit has no gradients: it leases its parameters only.
TEST(UnitPeak, FrozenUnitLeasesParametersOnly) {
  TrainingSpec spec = base_spec("fsdp", 2, kFourBlocks);
  spec.make_model = [config = spec.model](nn::Context& context) {
    auto model = nn::make_model(context, config);
    for (const auto& parameter : model->parameters())
      if (parameter->name().starts_with("h.0.")) {
        nn::Tensor tensor = parameter->tensor();
        tensor.set_requires_grad(false);
      }
    return model;
  };
  int frozen = 0;
  for (const UnitStats& unit : train(spec).units) {
    const auto padded = static_cast<std::size_t>(unit.elements + unit.padding);
    const bool is_frozen = unit.name == "h.0";
    frozen += is_frozen ? 1 : 0;
    EXPECT_EQ(unit.peak_bytes, padded * (is_frozen ? 4 : 8)) << unit.name;
  }
  EXPECT_EQ(frozen, 1);
}

TEST(Cost, ClippingCallsOneAllReducePerShardedAxis) {
  for (const auto& [name, calls] :
       {std::pair("ddp", 0u), std::pair("zero1", 1u), std::pair("fsdp", 1u), std::pair("hsdp", 1u)}) {
    TrainingSpec spec = base_spec(name, 4, kFourBlocks);
    spec.engine.clip_norm = 1.0;
    // One more compares the execution order between the ranks.
    EXPECT_EQ(train(spec).all_later.control.calls, (calls + 1) * static_cast<unsigned>(spec.steps - 1)) << name;
  }
}

// --- overlap

double exposed_ms(int prefetch) {
  TrainingSpec spec = base_spec("fsdp", 2, kFourBlocks);
  spec.global_batch = 16;
  spec.seq_len = 64;
  spec.engine.prefetch = prefetch;
  spec.decorate = [](auto world) {  // uses no core
    return comm::slow_links(std::move(world), {.link = {std::chrono::milliseconds(4), 1e15}, .intra = {}, .hosts = 1});
  };
  spec.lazy_streams = false;  // timed work must run when it is submitted
  std::int64_t exposed = 0;
  for (const base::TraceEvent& event : train(spec).last_events)
    if (event.kind == base::TraceEventKind::unshard_wait) exposed += event.duration_ns();
  return static_cast<double>(exposed) / 1e6;
}

TEST(Prefetch, HidesGathersBehindCompute) {
  // Forward the root and 4 blocks, backward 3 blocks (the last stays unsharded): all fully exposed without prefetch.
  const double without = exposed_ms(0);
  EXPECT_GT(without, 8 * 4.0 * 0.95);
  EXPECT_LT(exposed_ms(1), 0.85 * without);
}

// --- negative controls

/// Gathers into its own memory and copies from there.
class Copying final : public CollectivePlugin {
 public:
  WorkChain run(const CollectiveCall& call) override {
    for (const FlatTransfer& t : call.transfers) {
      staging_.resize(t.out.bytes());
      comm::View staged = t.out;
      staged.data = staging_.data();
      call.channel.all_gather(t.in, staged, call.options).wait();
      call.copier.copy(*call.options.after, t.out.data, staging_.data(), t.out.bytes());
      call.options.after->synchronize();  // before the next transfer writes to the same memory
    }
    return {};
  }

 private:
  std::vector<std::byte> staging_;
};

TEST(Cost, DetectsCopyingPlugin) {
  TrainingSpec spec = base_spec("fsdp", 2, kFourBlocks);
  spec.engine.collectives.add(comm::OpKind::all_gather, "copying", [] { return std::make_unique<Copying>(); });
  spec.engine.strategy.all_gather = "copying";
  const TrainingRecord record = train(spec);
  std::uint64_t gathered = 0;
  for (const UnitSize& unit : record.unit_sizes)
    gathered += static_cast<std::uint64_t>(unit.padded) * 4 * (unit.kept_after_forward ? 1 : 2);
  EXPECT_GE(record.copied_bytes, gathered * static_cast<std::uint64_t>(spec.steps));
}

/// What some engines run as ZeRO: all-reduce everything, use a slice.
class AllReduceAndSlice final : public CollectivePlugin {
 public:
  WorkChain run(const CollectiveCall& call) override {
    WorkChain works;
    for (const FlatTransfer& t : call.transfers) {
      const comm::View whole{const_cast<void*>(t.in.data), t.in.count, t.in.dtype, t.in.device};
      works.add(
          call.channel.all_reduce(t.in, whole, call.op, call.options));  // in place: `out` is this rank's slice of `in`
    }
    return works;
  }
};

TEST(Cost, DetectsAllReduceInZero1) {
  TrainingSpec spec = base_spec("zero1", 4, kFourBlocks);
  spec.engine.collectives.add(comm::OpKind::reduce_scatter, "all_reduce_and_slice",
                              [] { return std::make_unique<AllReduceAndSlice>(); });
  spec.engine.strategy.reduce_scatter = "all_reduce_and_slice";
  const TrainingRecord record = train(spec);
  const auto formula = communication_formula(strategy_named("zero1"), record.mesh, record.unit_sizes);
  const auto steps = static_cast<std::uint64_t>(spec.steps - 1);
  const EngineTraffic& t = record.all_later;
  const std::uint64_t sent = (t.all_gather.bytes_sent + t.reduce_scatter.bytes_sent + t.all_reduce.bytes_sent) / steps;
  EXPECT_EQ(2 * sent, 3 * (formula.bytes.all_gather + formula.bytes.reduce_scatter));  // 3 Psi instead of 2 Psi
}

/// A unit that is never resharded exceeds the bound on unsharded parameters.
TEST(Cost, DetectsUnitsThatAreNeverResharded) {
  TrainingSpec spec = base_spec("fsdp", 2, kFourBlocks);
  spec.engine.prefetch = 100;
  const TrainingRecord record = train(spec);
  const PeakBounds bounds = peak_formula(spec.engine.strategy, record.mesh, record.unit_sizes, {});
  EXPECT_GT(record.memory_trackers[0].peak_of(MemoryCategory::unsharded_parameter), bounds.unsharded_parameter);
}

/// The limits apply to any prefetch setting and change no result.
TEST(GatherLimit, HoldsByCountAndByBytes) {
  TrainingSpec spec = base_spec("fsdp", 2, kFourBlocks);
  const auto peak = [&](int prefetch, int count, std::size_t bytes) {
    spec.engine.prefetch = prefetch;
    spec.engine.limit_all_gathers = count;
    spec.engine.limit_gather_bytes = bytes;
    const TrainingRecord record = train(spec);
    EXPECT_EQ(record.parameters, train(base_spec("fsdp", 2, kFourBlocks)).parameters);
    return record.memory_trackers[0].peak_of(MemoryCategory::unsharded_parameter);
  };
  const std::uint64_t none = peak(0, 0, 0), one = peak(1, 0, 0), all = peak(100, 0, 0);
  ASSERT_LT(none, one);
  ASSERT_LT(one, all);
  EXPECT_EQ(peak(100, 1, 0), none);
  EXPECT_EQ(peak(100, 2, 0), one);
  EXPECT_EQ(peak(100, 0, 1), none) << "the unit that computes is gathered in any case";
  const TrainingRecord record = train(spec);
  std::int64_t block = 0;
  for (const UnitSize& unit : record.unit_sizes)
    if (!unit.is_root) block = std::max(block, unit.padded);
  EXPECT_EQ(peak(100, 0, 2 * static_cast<std::size_t>(block) * sizeof(float)), one);
  EXPECT_EQ(peak(100, 100, 0), all);
}

// --- the formulas against the table in the documentation

const std::vector<UnitSize> kUnits = {
    {960, true, true}, {1920, false, false}, {2880, false, false}, {480, true, false}};
constexpr std::uint64_t kPsi = 960 + 1920 + 2880 + 480;
constexpr std::uint64_t kKept = 960 + 480;
constexpr std::uint64_t kBytes = 4;

std::vector<UnitSize> all_kept() {
  std::vector<UnitSize> units = kUnits;
  for (UnitSize& unit : units) unit.kept_after_forward = true;
  return units;
}

TEST(Formulas, Ddp) {
  for (const std::uint64_t n : {2u, 3u, 4u, 5u}) {
    const auto f = communication_formula(strategy_named("ddp"), MeshShape::grid(1, static_cast<int>(n)), all_kept());
    EXPECT_EQ(f.calls, (TrafficVolume{0, 0, 4}));
    EXPECT_EQ(f.bytes, (TrafficVolume{0, 0, 2 * (n - 1) * kBytes * kPsi / n}));
  }
}

TEST(Formulas, Zero1AndZero2) {
  for (const char* name : {"zero1", "zero2"}) {
    for (const std::uint64_t n : {2u, 3u, 4u, 5u}) {
      const auto f = communication_formula(strategy_named(name), MeshShape::grid(1, static_cast<int>(n)), all_kept());
      const std::uint64_t once = (n - 1) * kBytes * kPsi / n;
      EXPECT_EQ(f.calls, (TrafficVolume{4, 4, 0}));
      EXPECT_EQ(f.bytes, (TrafficVolume{once, once, 0}));
    }
  }
}

TEST(Formulas, Fsdp) {
  for (const std::uint64_t n : {2u, 3u, 4u, 5u}) {
    const auto f = communication_formula(strategy_named("fsdp"), MeshShape::grid(1, static_cast<int>(n)), kUnits);
    EXPECT_EQ(f.calls, (TrafficVolume{2 * 4 - 2, 4, 0}));
    EXPECT_EQ(f.bytes, (TrafficVolume{(n - 1) * kBytes * (2 * kPsi - kKept) / n, (n - 1) * kBytes * kPsi / n, 0}));
  }
}

TEST(Formulas, ShardGradOpGathersUnitsOnce) {
  const auto f = communication_formula(strategy_named("shard_grad_op"), MeshShape::grid(1, 4), all_kept());
  EXPECT_EQ(f.calls, (TrafficVolume{4, 4, 0}));
  EXPECT_EQ(f.bytes, (TrafficVolume{3 * kBytes * kPsi / 4, 3 * kBytes * kPsi / 4, 0}));
}

TEST(Formulas, Hsdp) {
  const std::uint64_t r = 2;
  const std::uint64_t s = 3;
  const auto f = communication_formula(strategy_named("hsdp"), MeshShape::grid(2, 3), kUnits);
  EXPECT_EQ(f.calls, (TrafficVolume{2 * 4 - 2, 4, 4}));
  EXPECT_EQ(f.bytes, (TrafficVolume{(s - 1) * kBytes * (2 * kPsi - kKept) / s, (s - 1) * kBytes * kPsi / s,
                                    2 * (r - 1) * kBytes * kPsi / r / s}));
}

TEST(Formulas, AxesOfLengthOneCallNothing) {
  for (const std::string& name : strategy_names()) {
    const auto f = communication_formula(strategy_named(name), MeshShape::grid(1, 1), kUnits);
    EXPECT_EQ(f.calls, TrafficVolume{}) << name;
    EXPECT_EQ(f.bytes, TrafficVolume{}) << name;
  }
  const auto f = communication_formula(strategy_named("hsdp"), MeshShape::grid(1, 4), kUnits);
  EXPECT_EQ(f.calls, communication_formula(strategy_named("fsdp"), MeshShape::grid(1, 4), kUnits).calls);
}

/// The ZeRO table for f32 and AdamW: 16P, 8P + 8P/n, 4P + 12P/n, 16P/n.
TEST(Formulas, ModelState) {
  const auto total = [](const char* name, const MeshShape& mesh) {
    const ModelStateBytes bytes = model_state_formula(strategy_named(name), mesh, kPsi, 2);
    return bytes.parameter + bytes.gradient + bytes.optimizer;
  };
  for (const std::uint64_t n : {1u, 2u, 3u, 4u, 5u}) {
    const MeshShape mesh = MeshShape::grid(1, static_cast<int>(n));
    EXPECT_EQ(total("ddp", mesh), 16 * kPsi);
    EXPECT_EQ(total("zero1", mesh), 8 * kPsi + 8 * kPsi / n);
    EXPECT_EQ(total("zero2", mesh), 4 * kPsi + 12 * kPsi / n);
    EXPECT_EQ(total("fsdp", mesh), 16 * kPsi / n);
    EXPECT_EQ(total("shard_grad_op", mesh), 16 * kPsi / n);
  }
  EXPECT_EQ(total("hsdp", MeshShape::grid(2, 3)), 16 * kPsi / 3);
}

TEST(Formulas, Peaks) {
  const MeshShape mesh = MeshShape::grid(1, 4);
  const PeakBounds fsdp = peak_formula(strategy_named("fsdp"), mesh, kUnits, {});
  EXPECT_EQ(fsdp.unsharded_parameter, 4u * (960 + 1920 + 2880));
  EXPECT_EQ(fsdp.unsharded_gradient, 4u * (960 + 1920 + 2880));
  EXPECT_EQ(peak_formula(strategy_named("fsdp"), mesh, kUnits, {.prefetch = 0}).unsharded_parameter, 4u * (960 + 2880));
  EXPECT_EQ(peak_formula(strategy_named("ddp"), mesh, kUnits, {}).unsharded_parameter, 0u);
  EXPECT_EQ(peak_formula(strategy_named("zero2"), mesh, kUnits, {}).unsharded_parameter, 0u);
  EXPECT_EQ(peak_formula(strategy_named("zero2"), mesh, kUnits, {}).unsharded_gradient, 4u * (960 + 1920 + 2880));
  EXPECT_EQ(peak_formula(strategy_named("shard_grad_op"), mesh, all_kept(), {}).unsharded_parameter, 4 * kPsi);
}

}  // namespace
}  // namespace tessera::fsdp
