// What PyTorch's own tests of FSDP2 assert, as properties of this engine, over shared memory and over sockets. Each
// test is named after its property; the files beside this one look closer, with the controls.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tessera/nn/layers/linear.h"
#include "tessera/nn/ops/arithmetic.h"
#include "tessera/nn/ops/cross_entropy.h"
#include "tests/harness/training.h"

namespace tessera::fsdp {
namespace {

using base::DType;
using base::EventKind;
using base::MemoryUse;
using harness::engine_for;
using harness::same_bits;
using harness::train;
using harness::TrainingRecord;
using harness::TrainingSpec;
using testing::HasSubstr;

const std::vector<std::string> kStrategies = {"ddp", "zero1", "zero2", "fsdp", "shard_grad_op", "hsdp"};

class Acceptance : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  std::string backend() const { return std::get<0>(GetParam()); }
  int ranks() const { return std::get<1>(GetParam()); }

  TrainingSpec spec(const std::string& strategy) const {
    TrainingSpec spec;
    spec.backend = backend();
    spec.ranks = ranks();
    spec.global_batch = 2 * ranks();
    spec.model.layers = 3;
    spec.engine = engine_for(strategy);
    spec.engine.measure_norm = true;
    return spec;
  }
  /// Those that this world has a mesh for.
  std::vector<std::string> strategies() const {
    std::vector<std::string> names = kStrategies;
    if (ranks() % 2 != 0) names.pop_back();
    return names;
  }
};

INSTANTIATE_TEST_SUITE_P(Worlds, Acceptance,
                         testing::Combine(testing::Values("shm", "tcp"), testing::Values(1, 2, 3, 4)),
                         [](const auto& test) {
                           return std::get<0>(test.param) + "_" + std::to_string(std::get<1>(test.param));
                         });

class AcceptanceOfSeven : public Acceptance {};
INSTANTIATE_TEST_SUITE_P(Worlds, AcceptanceOfSeven, testing::Combine(testing::Values("shm", "tcp"), testing::Values(7)),
                         [](const auto& test) { return std::get<0>(test.param); });

/// Sizes that no world divides.
nn::ModelConfig odd_model() {
  nn::ModelConfig model = nn::preset("gpt-nano");
  model.name = "odd";
  model.layers = 3;
  model.width = 36;
  model.heads = model.kv_heads = 3;
  model.head_dim = 12;
  model.hidden = 4 * 36;
  model.vocabulary = 257;
  model.context = 17;
  return model;
}

void expect_parity(TrainingSpec spec, const std::vector<std::string>& strategies, const std::string& decorators = "") {
  spec.model = odd_model();
  spec.steps = 10;
  const TrainingRecord ddp = train(spec);
  spec.decorators = decorators;
  spec.engine.poison = true;
  for (const std::string& name : strategies) {
    spec.engine.strategy = strategy_named(name);
    EXPECT_TRUE(same_bits(ddp, train(spec))) << name;
  }
}

TEST_P(Acceptance, P01_LossesOfTenStepsEqualReplicasBitwise) { expect_parity(spec("ddp"), strategies()); }
TEST_P(AcceptanceOfSeven, P01_LossesOfTenStepsEqualReplicasBitwise) { expect_parity(spec("ddp"), strategies()); }

TEST_P(Acceptance, P02_SoTheyDoWhereCollectivesAreLate) {
  expect_parity(spec("ddp"), {"fsdp", "zero2"}, "delay:1ms,seed=3");
}

TEST_P(Acceptance, P03_CallsAndBytesEqualTheFormula) {
  for (const std::string& name : strategies()) {
    TrainingSpec one = spec(name);
    one.model = odd_model();
    const TrainingRecord record = train(one);
    const auto formula = communication_formula(one.engine.strategy, record.mesh, record.unit_sizes);
    for (const EngineTraffic& rank : record.later_by_rank) {
      EXPECT_EQ(harness::calls_per_step(rank, one.steps - 1), formula.calls) << name;
      EXPECT_EQ(harness::bytes_per_step(rank, one.steps - 1), formula.bytes) << name;
    }
    for (const Engine::UnitInfo& unit : record.units) EXPECT_EQ((unit.elements + unit.padding) % (8 * ranks()), 0);
  }
}

std::string gathers_and_computations(const TrainingRecord& record) {
  std::string order;
  for (const base::EventRecord& event : record.last_events) {
    if (event.kind == EventKind::unshard_issue) order += " +" + event.unit;
    if (event.kind == EventKind::forward || event.kind == EventKind::backward) order += " " + event.unit;
  }
  return order;
}

TEST_P(Acceptance, P04_EventsComeInTheOrderOfEachPrefetchDepth) {
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

TEST_P(Acceptance, P05_PeaksOfMemoryEqualTheFormula) {
  for (const std::string& name : strategies()) {
    const TrainingSpec one = spec(name);
    const TrainingRecord record = train(one);
    const PeakBounds peak = peak_formula(one.engine.strategy, record.mesh, record.unit_sizes, {});
    std::int64_t padded = 0;
    for (const UnitSize& unit : record.unit_sizes) padded += unit.padded;
    const ModelStateBytes state = model_state_formula(one.engine.strategy, record.mesh, padded, 2);
    for (const base::Ledger::Snapshot& ledger : record.ledgers) {
      EXPECT_EQ(ledger.peak_of(MemoryUse::unsharded_parameter), peak.unsharded_parameter) << name;
      EXPECT_LE(ledger.peak_of(MemoryUse::unsharded_gradient), peak.unsharded_gradient) << name;
      EXPECT_EQ(ledger.peak_of(MemoryUse::parameter), state.parameter) << name;
      EXPECT_EQ(ledger.peak_of(MemoryUse::gradient), state.gradient) << name;
      EXPECT_EQ(ledger.peak_of(MemoryUse::optimizer), state.optimizer) << name;
    }
  }
}

// P06: overlap_test.cpp.

TEST_P(Acceptance, P07_MicrobatchesGiveTheSameBitsAndCostTheirFormula) {
  for (const Accumulation way : {Accumulation::every, Accumulation::last, Accumulation::scatter})
    for (const std::string& name : strategies())
      for (const bool keep : {false, true}) {
        TrainingSpec one = spec(name);
        one.microbatches = 2;
        one.engine.strategy = with_accumulation(one.engine.strategy, way);
        one.engine.reshard_after_backward = !keep;
        const TrainingRecord record = train(one);
        const StepCourse course{.microbatches = 2, .reshard_after_backward = !keep};
        const auto formula = communication_formula(one.engine.strategy, record.mesh, record.unit_sizes, {}, course);
        EXPECT_EQ(harness::calls_per_step(record.all_later, one.steps - 1), formula.calls) << name;
        EXPECT_EQ(harness::bytes_per_step(record.all_later, one.steps - 1), formula.bytes) << name;
        if (way == Accumulation::scatter) continue;  // adds in another order where there are replicas
        TrainingSpec ddp = spec("ddp");
        ddp.microbatches = 2;
        ddp.engine.strategy = with_accumulation(ddp.engine.strategy, way);
        EXPECT_TRUE(same_bits(train(ddp), record)) << name;
      }
}

/// A layer that is used twice, one that is used by odd ranks' batches only, and two that share a weight of odd size.
class Odd final : public nn::Layer<Odd> {
 public:
  explicit Odd(nn::Context& context)
      : Layer(context),
        twice_(add<nn::Linear>("twice", nn::LinearOptions{.in = 9, .out = 9})),
        sometimes_(add<nn::Linear>("sometimes", nn::LinearOptions{.in = 9, .out = 9})),
        never_(add<nn::Linear>("never", nn::LinearOptions{.in = 9, .out = 9})),
        out_(add<nn::Linear>("out", nn::LinearOptions{.in = 9, .out = 5})) {}
  nn::Tensor forward(const nn::Tensor& x, bool with_sometimes) {
    nn::Tensor y = twice_(twice_(x));
    if (with_sometimes) y = nn::ops::add(y, sometimes_(x));
    return out_(y);
  }

 private:
  nn::Linear &twice_, &sometimes_, &never_, &out_;
};

/// By name, after three steps of plain SGD, in double, from gradients that ranks average.
std::map<std::string, std::vector<float>> train_odd(const std::string& backend, const std::string& strategy,
                                                    int ranks) {
  std::map<std::string, std::vector<float>> result;
  comm::Config config;
  config.backend = backend;
  config.timeout = std::chrono::seconds(30);
  comm::run_threads(ranks, config, [&](comm::Communicator& world) {
    nn::Context context({.threads = 1, .ledger = world.ledger(), .memory = {}, .make_stream = {}});
    Odd model(context);
    EngineOptions options = engine_for(strategy);
    options.wrap = "twice;sometimes;never;out";
    options.poison = true;
    options.optimizer = {.kind = nn::OptimizerConfig::Kind::sgd, .weight_decay = 0};
    Engine engine(model, world, options);
    engine.initialize(3);
    for (int step = 0; step < 3; ++step) {
      const nn::Tensor x = nn::Tensor::empty(context, {4, 9}, DType::f32);
      for (int i = 0; i < 36; ++i) x.data<float>()[i] = std::sin(static_cast<float>(i + 40 * world.rank() + 7 * step));
      const nn::Tensor targets = nn::Tensor::zeros(context, {4}, DType::i32);
      nn::Tape tape;
      nn::Tensor loss;
      {
        const nn::TapeScope recording(context, &tape);
        loss = nn::ops::cross_entropy(model(x, step != 1), targets);
      }
      tape.backward(loss);
      engine.step(0.1);
    }
    engine.visit([&](const nn::Parameter& parameter, std::span<const float> values) {
      if (world.rank() == 0) result[parameter.name()].assign(values.begin(), values.end());
    });
  });
  return result;
}

TEST_P(Acceptance, P08_UnusedAndRepeatedModulesTrainAsInReplicas) {
  const auto ddp = train_odd(backend(), "ddp", ranks());
  for (const std::string& name : strategies()) EXPECT_TRUE(train_odd(backend(), name, ranks()) == ddp) << name;
  // What nothing uses stays; what one step doesn't use is used by the others.
  const auto one = train_odd(backend(), "ddp", 1);
  EXPECT_EQ(ddp.at("never.weight"), one.at("never.weight"));
  EXPECT_FALSE(ddp.at("sometimes.weight") == one.at("never.weight"));
}

TEST_P(Acceptance, P08_FrozenParametersStayAndTheOthersTrainAsInReplicas) {
  std::optional<TrainingRecord> ddp;
  for (const std::string& name : strategies()) {
    TrainingSpec one = spec(name);
    one.model = odd_model();  // tied embeddings of 257 rows
    one.after_step = [](int, int step, Engine& engine, nn::CausalModel& model) {
      if (step > 1) return;
      for (const auto& parameter : model.parameters()) {
        nn::Tensor tensor = parameter->tensor();
        if (parameter->name().find("mlp") != std::string::npos) tensor.set_requires_grad(step == 1);
      }
      engine.refresh();
    };
    one.steps = 4;
    const TrainingRecord record = train(one);
    if (!ddp) ddp = record;
    EXPECT_TRUE(same_bits(*ddp, record)) << name;
  }
}

TEST_P(Acceptance, P09_ClippingByAnyNormTakesOneReductionPerAxis) {
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

/// Which types are sent.
class Typed final : public CollectivePlugin {
 public:
  Typed(comm::OpKind kind, std::set<std::pair<comm::OpKind, DType>>& seen, std::mutex& mutex)
      : kind_(kind), seen_(seen), mutex_(mutex) {}
  Works run(const CollectiveCall& call) override {
    Works works;
    for (const Transfer& t : call.transfers) {
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
  if (ranks() == 1) return;  // nothing is sent: P15
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
    EXPECT_THAT(seen,
                testing::UnorderedElementsAre(std::pair(comm::OpKind::all_gather, DType::bf16),
                                              std::pair(comm::OpKind::reduce_scatter, reduce.value_or(DType::bf16))));
  }
}

TEST_P(Acceptance, P11_OneRanksInfinityMakesAllSkip) {
  for (const std::string& name : strategies()) {
    TrainingSpec one = spec(name);
    one.steps = 2;
    one.engine.scales_loss = true;
    std::mutex mutex;
    std::set<bool> done;
    one.after_backward = [](int, int step, Engine& engine, nn::CausalModel&) {
      if (step != 1) return;
      engine.visit_gradients([](const GradientRange& gradient) {  // on the ranks that hold that element
        if (gradient.parameter.name() == "h.2.mlp.c_fc.weight" && gradient.range.begin == 0)
          static_cast<float*>(gradient.data)[0] = INFINITY;
      });
    };
    std::map<std::string, std::vector<float>> before, after;
    one.after_step = [&](int rank, int step, Engine& engine, nn::CausalModel&) {
      auto& values = step == 0 ? before : after;
      engine.visit([&](const nn::Parameter& p, std::span<const float> v) {
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
      engine.reset();
    };
    EXPECT_TRUE(same_bits(undisturbed, train(one))) << name;
  }
}

// P14: order_test.cpp.

TEST_P(Acceptance, P15_OneRankCallsNoCollective) {
  if (ranks() > 1) return;
  for (const std::string& name : kStrategies) {
    TrainingSpec one = spec(name);
    one.engine.clip_norm = 1;
    const EngineTraffic t = train(one).all_later;
    EXPECT_EQ(t.all_gather.calls + t.reduce_scatter.calls + t.all_reduce.calls + t.control.calls, 0U) << name;
  }
}

/// reduce_scatter by all_reduce: each rank uses its slice.
class Lowered final : public CollectivePlugin {
 public:
  Works run(const CollectiveCall& call) override {
    Works works;
    for (const Transfer& t : call.transfers) {
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
    one.engine.limit_gathers = 1;
    one.after_backward = [](int, int, Engine& engine, nn::CausalModel& model) {  // waits for everything in flight
      engine.settle();
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

// P19 asks for the planner.

TEST_P(Acceptance, P20_StrategiesMayBeMixedInOneModel) {
  const TrainingRecord ddp = train(spec("ddp"));
  TrainingSpec one = spec("fsdp");
  one.engine.strategy_of = [](const UnitSpec& unit) {
    return unit.name == "h.1" ? std::optional(strategy_named("ddp")) : std::nullopt;
  };
  EXPECT_TRUE(same_bits(ddp, train(one)));
}

}  // namespace
}  // namespace tessera::fsdp
