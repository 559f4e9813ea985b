// Properties that PyTorch's own tests of FSDP2 assert, over shared memory and over sockets. Each test is named after
// its property; the other files of this folder test the details, with negative controls. P10 to P20.
#include <cmath>

#include "tests/fsdp/acceptance.h"

namespace tessera::fsdp {
namespace {

INSTANTIATE_TEST_SUITE_P(Worlds, Acceptance, acceptance_worlds(), acceptance_name);

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

TEST_P(Acceptance, P10_MixedPrecisionSendsTheTypesThatWereAskedFor) {
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

TEST_P(Acceptance, P11_OneRanksInfinityMakesAllSkip) {
  for (const std::string& name : strategies()) {
    TrainingSpec one = spec(name);
    one.steps = 2;
    one.engine.use_loss_scaling = true;
    std::mutex mutex;
    std::set<bool> done;
    one.after_backward = [](int, int step, Engine& engine, nn::CausalModel&) {
      if (step != 1) return;
      engine.for_each_gradient([](const GradientShard& gradient) {  // on the ranks that own this element
        if (gradient.parameter.name() == "h.2.mlp.c_fc.weight" && gradient.range.begin == 0)
          static_cast<float*>(gradient.data)[0] = INFINITY;
      });
    };
    std::map<std::string, std::vector<float>> before, after;
    one.after_step = [&](int rank, int step, Engine& engine, nn::CausalModel&) {
      auto& values = step == 0 ? before : after;
      engine.state().for_each_parameter([&](const nn::Parameter& p, std::span<const float> v) {
        if (rank == 0) values[p.name()].assign(v.begin(), v.end());
      });
      const std::lock_guard lock(mutex);
      if (step == 1) done.insert(std::isfinite(engine.grad_norm()));
    };
    train(one);
    EXPECT_THAT(done, testing::ElementsAre(false)) << name;
    EXPECT_TRUE(!before.empty() && before == after) << name;
  }
}

// P12: checkpoint_test.cpp, and tests/tools/checkpoint_faults.

TEST_P(Acceptance, P13_AnExceptionLeavesTheEngineUsable) {
  for (const std::string& name : strategies()) {
    TrainingSpec one = spec(name);
    const TrainingRecord undisturbed = train(one);
    one.after_step = [&](int rank, int step, Engine& engine, nn::CausalModel& model) {
      struct Thrown {};
      const auto batch = harness::make_batch(model.context(), one, step, rank);
      nn::Tape tape;
      const nn::TapeScope recording(model.context(), &tape);
      const nn::Tensor loss = model.loss(batch.tokens, batch.targets);
      tape.record("throws", loss, [] { throw Thrown{}; });
      EXPECT_THROW(tape.backward(loss), Thrown);
      engine.abort_step();
    };
    EXPECT_TRUE(same_bits(undisturbed, train(one))) << name;
  }
}

// P14: order_test.cpp.

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

TEST_P(Acceptance, P16_WhatATransportLacksIsLoweredByAPlugInOrRefusedByName) {
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

TEST_P(Acceptance, P17_OverlappedAndSerialRunsHaveTheSameBits) {
  for (const std::string& name : strategies()) {
    TrainingSpec one = spec(name);
    const TrainingRecord overlapped = train(one);
    one.engine.prefetch = 0;
    one.engine.limit_all_gathers = 1;
    one.after_backward = [](int, int, Engine& engine, nn::CausalModel& model) {  // waits for all pending work
      engine.wait();
      model.context().stream().synchronize();
    };
    EXPECT_TRUE(same_bits(overlapped, train(one))) << name;
  }
}

TEST_P(Acceptance, P18_NothingReadsWhatWasGivenBack) {
  for (const std::string& name : strategies()) {
    TrainingSpec one = spec(name);
    const TrainingRecord plain = train(one);
    one.engine.poison = true;
    one.lazy_streams = true;
    EXPECT_TRUE(same_bits(plain, train(one))) << name;
  }
}

// P19: planner_times_test.cpp.

TEST_P(Acceptance, P20_StrategiesMayBeMixedInOneModel) {
  const TrainingRecord ddp = train(spec("ddp"));
  TrainingSpec one = spec("fsdp");
  one.engine.unit_strategy = [](const UnitSpec& unit) {
    return unit.name == "h.1" ? std::optional(strategy_named("ddp")) : std::nullopt;
  };
  EXPECT_TRUE(same_bits(ddp, train(one)));
}

}  // namespace
}  // namespace tessera::fsdp
