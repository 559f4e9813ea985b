// Properties that PyTorch's own tests of FSDP2 assert, over shared memory and over sockets: calls, bytes, dtypes,
// events and memory of a step. Each test is named after its property; acceptance_test.cpp has those of the values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "tests/fsdp/models.h"

namespace tessera::fsdp {
namespace {

using base::DType;
using base::MemoryCategory;
using base::TraceEventKind;
using harness::same_bits;
using harness::train;
using harness::TrainingRecord;
using testing::HasSubstr;

INSTANTIATE_TEST_SUITE_P(Worlds, Acceptance, acceptance_worlds(), acceptance_name);

TEST_P(Acceptance, P03_CallsAndBytesEqualFormula) {
  for (const std::string& name : strategies()) {
    TrainingSpec one = spec(name);
    one.model = uneven_model();
    const TrainingRecord record = train(one);
    const auto formula = communication_formula(one.engine.strategy, record.mesh, record.unit_sizes);
    for (const EngineTraffic& rank : record.later_by_rank) {
      EXPECT_EQ(harness::calls_per_step(rank, one.steps - 1), formula.calls) << name;
      EXPECT_EQ(harness::bytes_per_step(rank, one.steps - 1), formula.bytes) << name;
    }
    for (const UnitStats& unit : record.units) EXPECT_EQ((unit.elements + unit.padding) % (8 * ranks()), 0);
  }
}

std::string gathers_and_computations(const TrainingRecord& record) {
  std::string order;
  for (const base::TraceEvent& event : record.last_events) {
    if (event.kind == TraceEventKind::unshard_issue) order += " +" + event.unit;
    if (event.kind == TraceEventKind::forward || event.kind == TraceEventKind::backward) order += " " + event.unit;
  }
  return order;
}

TEST_P(Acceptance, P04_EventsFollowPrefetchDepth) {
  if (ranks() == 1) {
    EXPECT_EQ(gathers_and_computations(train(spec("fsdp"))), " root h.0 h.1 h.2 root h.2 h.1 h.0");
    return;
  }
  const char* const orders[] = {" +root root +h.0 h.0 +h.1 h.1 +h.2 h.2 root h.2 +h.1 h.1 +h.0 h.0",
                                " +root +h.0 root +h.1 h.0 +h.2 h.1 h.2 root +h.1 h.2 +h.0 h.1 h.0",
                                " +root +h.0 +h.1 root +h.2 h.0 h.1 h.2 root +h.1 +h.0 h.2 h.1 h.0"};
  for (int depth = 0; depth < 3; ++depth) {
    TrainingSpec one = spec("fsdp");
    one.engine.prefetch = depth;
    EXPECT_EQ(gathers_and_computations(train(one)), orders[depth]);
  }
}

TEST_P(Acceptance, P05_MemoryPeaksEqualFormula) {
  for (const std::string& name : strategies()) {
    const TrainingSpec one = spec(name);
    const TrainingRecord record = train(one);
    const PeakBounds peak = peak_formula(one.engine.strategy, record.mesh, record.unit_sizes, {});
    std::int64_t padded = 0;
    for (const UnitSize& unit : record.unit_sizes) padded += unit.padded;
    const ModelStateBytes state = model_state_formula(one.engine.strategy, record.mesh, padded, 2);
    for (const base::MemoryTracker::Snapshot& memory_tracker : record.memory_trackers) {
      EXPECT_EQ(memory_tracker.peak_of(MemoryCategory::unsharded_parameter), peak.unsharded_parameter) << name;
      EXPECT_LE(memory_tracker.peak_of(MemoryCategory::unsharded_gradient), peak.unsharded_gradient) << name;
      EXPECT_EQ(memory_tracker.peak_of(MemoryCategory::parameter), state.parameter) << name;
      EXPECT_EQ(memory_tracker.peak_of(MemoryCategory::gradient), state.gradient) << name;
      EXPECT_EQ(memory_tracker.peak_of(MemoryCategory::optimizer), state.optimizer) << name;
    }
  }
}

TEST_P(Acceptance, P07_MicrobatchesAreBitwiseEqualAndCostFormula) {
  for (const Accumulation accumulation : {Accumulation::every, Accumulation::last, Accumulation::scatter})
    for (const std::string& name : strategies())
      for (const bool keep : {false, true}) {
        TrainingSpec one = spec(name);
        one.microbatches = 2;
        one.engine.strategy = with_accumulation(one.engine.strategy, accumulation);
        one.engine.reshard_after_backward = !keep;
        const TrainingRecord record = train(one);
        const StepShape shape{.microbatches = 2, .reshard_after_backward = !keep};
        const auto formula = communication_formula(one.engine.strategy, record.mesh, record.unit_sizes, {}, shape);
        EXPECT_EQ(harness::calls_per_step(record.all_later, one.steps - 1), formula.calls) << name;
        EXPECT_EQ(harness::bytes_per_step(record.all_later, one.steps - 1), formula.bytes) << name;
        if (accumulation == Accumulation::scatter) continue;  // adds in another order on meshes with replicas
        TrainingSpec ddp = spec("ddp");
        ddp.microbatches = 2;
        ddp.engine.strategy = with_accumulation(ddp.engine.strategy, accumulation);
        EXPECT_TRUE(same_bits(train(ddp), record)) << name;
      }
}

TEST_P(Acceptance, P09_ClippingByAnyNormCostsOneReductionPerAxis) {
  using nn::kernels::Norm;
  for (const Norm norm : {Norm::one, Norm::two, Norm::three, Norm::infinity}) {
    TrainingSpec one = spec("ddp");
    one.engine.norm = norm;
    one.engine.clip_norm = 0.3;
    const TrainingRecord ddp = train(one);
    for (const std::string& name : strategies()) {
      one.engine.strategy = strategy_named(name);
      const TrainingRecord record = train(one);
      EXPECT_TRUE(same_bits(ddp, record)) << name;
      const unsigned orders = ranks() > 1 ? 1 : 0,
                     norms = ranks() > 1 && name != "ddp" && record.mesh.size_of(kShardAxis) > 1 ? 1 : 0;
      EXPECT_EQ(record.all_later.control.calls, (orders + norms) * static_cast<unsigned>(one.steps - 1)) << name;
    }
  }
}

/// Records the dtypes that are sent.
class Typed final : public CollectivePlugin {
 public:
  Typed(comm::OpKind kind, std::set<std::pair<comm::OpKind, DType>>& seen, std::mutex& mutex)
      : kind_(kind), seen_(seen), mutex_(mutex) {}
  WorkChain run(const CollectiveCall& call) override {
    WorkChain works;
    for (const FlatTransfer& t : call.transfers) {
      {
        const std::lock_guard lock(mutex_);
        seen_.insert({kind_, t.in.dtype});
      }
      works.add(kind_ == comm::OpKind::all_gather ? call.channel.all_gather(t.in, t.out, call.options)
                                                  : call.channel.reduce_scatter(t.in, t.out, call.op, call.options));
    }
    return works;
  }

 private:
  const comm::OpKind kind_;
  std::set<std::pair<comm::OpKind, DType>>& seen_;
  std::mutex& mutex_;
};

TEST_P(Acceptance, P10_MixedPrecisionSendsRequestedDtypes) {
  for (const std::optional<DType> reduce : {std::optional<DType>(), std::optional(DType::f32)}) {
    std::set<std::pair<comm::OpKind, DType>> seen;
    std::mutex mutex;
    TrainingSpec one = spec("fsdp");
    one.dtype = DType::bf16;
    one.engine.reduce_dtype = reduce;
    for (const auto kind : {comm::OpKind::all_gather, comm::OpKind::reduce_scatter})
      one.engine.collectives.add(kind, "typed", [&, kind] { return std::make_unique<Typed>(kind, seen, mutex); });
    one.engine.strategy.all_gather = one.engine.strategy.reduce_scatter = "typed";
    train(one);
    if (ranks() == 1) {
      EXPECT_TRUE(seen.empty());
      continue;
    }
    EXPECT_THAT(seen,
                testing::UnorderedElementsAre(std::pair(comm::OpKind::all_gather, DType::bf16),
                                              std::pair(comm::OpKind::reduce_scatter, reduce.value_or(DType::bf16))));
  }
}

TEST_P(Acceptance, P15_OneRankCallsNoCollective) {
  for (const std::string& name : strategies()) {
    TrainingSpec one = spec(name);
    one.engine.clip_norm = 1;
    const EngineTraffic t = train(one).all_later;
    const std::uint64_t calls = t.all_gather.calls + t.reduce_scatter.calls + t.all_reduce.calls + t.control.calls;
    EXPECT_EQ(calls == 0, ranks() == 1) << name;  // the other world sizes are the control
  }
}

/// reduce_scatter by means of all_reduce: each rank uses its slice.
class Lowered final : public CollectivePlugin {
 public:
  WorkChain run(const CollectiveCall& call) override {
    WorkChain works;
    for (const FlatTransfer& t : call.transfers) {
      const comm::View whole{const_cast<void*>(t.in.data), t.in.count, t.in.dtype, t.in.device};
      works.add(call.channel.all_reduce(t.in, whole, call.op, call.options));
    }
    return works;
  }
};

TEST_P(Acceptance, P16_MissingOperationsAreLoweredByPluginOrRejected) {
  TrainingSpec one = spec("zero1");
  const TrainingRecord plain = train(one);
  one.engine.collectives.add(comm::OpKind::reduce_scatter, "lowered", [] { return std::make_unique<Lowered>(); });
  one.engine.strategy.reduce_scatter = "lowered";
  const TrainingRecord lowered = train(one);
  EXPECT_TRUE(same_bits(plain, lowered));
  EXPECT_EQ(lowered.all_later.all_reduce.bytes_sent, 2 * plain.all_later.reduce_scatter.bytes_sent);
  one.engine.strategy.reduce_scatter = "nothing";
  try {
    train(one);
    FAIL();
  } catch (const base::InvalidUsage& error) {
    EXPECT_THAT(error.what(), testing::AllOf(HasSubstr("nothing"), HasSubstr("lowered"), HasSubstr("plain")));
  }
}

}  // namespace
}  // namespace tessera::fsdp
