// Properties that PyTorch's own tests of FSDP2 assert, over shared memory and over sockets. Each test is named after
// its property; the other files of this folder test the details, with negative controls. P01 to P09.
#include <cmath>

#include "tessera/nn/layers/linear.h"
#include "tessera/nn/ops/arithmetic.h"
#include "tessera/nn/ops/cross_entropy.h"
#include "tests/fsdp/acceptance.h"

namespace tessera::fsdp {
namespace {

INSTANTIATE_TEST_SUITE_P(Worlds, Acceptance, acceptance_worlds(), acceptance_name);

class AcceptanceOfSeven : public Acceptance {};
INSTANTIATE_TEST_SUITE_P(Worlds, AcceptanceOfSeven, testing::Combine(testing::Values("shm", "tcp"), testing::Values(7)),
                         [](const auto& test) { return std::get<0>(test.param); });

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
  expect_parity(spec("ddp"), strategies(), "delay:1ms,seed=3");
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
    for (const base::MemoryTracker::Snapshot& memory_tracker : record.memory_trackers) {
      EXPECT_EQ(memory_tracker.peak_of(MemoryCategory::unsharded_parameter), peak.unsharded_parameter) << name;
      EXPECT_LE(memory_tracker.peak_of(MemoryCategory::unsharded_gradient), peak.unsharded_gradient) << name;
      EXPECT_EQ(memory_tracker.peak_of(MemoryCategory::parameter), state.parameter) << name;
      EXPECT_EQ(memory_tracker.peak_of(MemoryCategory::gradient), state.gradient) << name;
      EXPECT_EQ(memory_tracker.peak_of(MemoryCategory::optimizer), state.optimizer) << name;
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
        const StepShape course{.microbatches = 2, .reshard_after_backward = !keep};
        const auto formula = communication_formula(one.engine.strategy, record.mesh, record.unit_sizes, {}, course);
        EXPECT_EQ(harness::calls_per_step(record.all_later, one.steps - 1), formula.calls) << name;
        EXPECT_EQ(harness::bytes_per_step(record.all_later, one.steps - 1), formula.bytes) << name;
        if (way == Accumulation::scatter) continue;  // adds in another order on meshes with replicas
        TrainingSpec ddp = spec("ddp");
        ddp.microbatches = 2;
        ddp.engine.strategy = with_accumulation(ddp.engine.strategy, way);
        EXPECT_TRUE(same_bits(train(ddp), record)) << name;
      }
}

/// A layer that is used twice, one that only the batches of odd ranks use, and two that share a weight of odd size.
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

/// Parameters by name after three steps of plain SGD, in double, with gradients averaged over the ranks.
std::map<std::string, std::vector<float>> train_odd(const std::string& backend, const std::string& strategy,
                                                    int ranks) {
  std::map<std::string, std::vector<float>> result;
  comm::InitOptions config;
  config.backend = backend;
  config.timeout = std::chrono::seconds(30);
  comm::run_threads(ranks, config, [&](comm::Communicator& world) {
    nn::Context context({.threads = 1, .memory_tracker = world.memory_tracker(), .memory = {}, .make_stream = {}});
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
    engine.state().for_each_parameter([&](const nn::Parameter& parameter, std::span<const float> values) {
      if (world.rank() == 0) result[parameter.name()].assign(values.begin(), values.end());
    });
  });
  return result;
}

TEST_P(Acceptance, P08_UnusedAndRepeatedModulesTrainAsInReplicas) {
  const auto ddp = train_odd(backend(), "ddp", ranks());
  for (const std::string& name : strategies()) EXPECT_TRUE(train_odd(backend(), name, ranks()) == ddp) << name;
  // A parameter that no rank uses keeps its value; one that a rank skips is updated from the other ranks' gradients.
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
      engine.apply_requires_grad();
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

}  // namespace
}  // namespace tessera::fsdp
