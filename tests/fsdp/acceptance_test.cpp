// Properties that PyTorch's own tests of FSDP2 assert, over shared memory and over sockets: values after training. Each
// test is named after its property; acceptance_cost_test.cpp has those of the cost. The other files of this directory
// test the details, with negative controls: P06 overlap_test.cpp, P12 checkpoint_test.cpp, P13 recovery_test.cpp, P14
// exec_order_test.cpp, P19 simulation_accuracy_test.cpp.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <optional>
#include <set>

#include "tessera/comm/slow_link/slow_link.h"
#include "tessera/nn/layers/linear.h"
#include "tessera/nn/ops/arithmetic.h"
#include "tessera/nn/ops/cross_entropy.h"
#include "tests/fsdp/models.h"

namespace tessera::fsdp {
namespace {

using base::DType;
using harness::same_bits;
using harness::train;
using harness::TrainingRecord;

INSTANTIATE_TEST_SUITE_P(Worlds, Acceptance, acceptance_worlds(), acceptance_name);

class AcceptanceOfSeven : public Acceptance {};
INSTANTIATE_TEST_SUITE_P(Worlds, AcceptanceOfSeven, testing::Combine(testing::Values("shm", "tcp"), testing::Values(7)),
                         [](const auto& test) { return std::get<0>(test.param); });

void expect_parity(TrainingSpec spec, const std::vector<std::string>& strategies,
                   const comm::CommunicatorDecorator& decorate = {}) {
  spec.model = uneven_model();
  spec.steps = 10;
  const TrainingRecord ddp = train(spec);
  spec.decorate = decorate;
  spec.engine.poison = true;
  for (const std::string& name : strategies) {
    spec.engine.strategy = strategy_named(name);
    EXPECT_TRUE(same_bits(ddp, train(spec))) << name;
  }
}

TEST_P(Acceptance, P01_LossesOfTenStepsEqualDdpBitwise) { expect_parity(spec("ddp"), strategies()); }
TEST_P(AcceptanceOfSeven, P01_LossesOfTenStepsEqualDdpBitwise) { expect_parity(spec("ddp"), strategies()); }

TEST_P(Acceptance, P02_LossesEqualDdpWithDelayedCollectives) {
  // Large operations take longer than small ones, and each rank has a time of its own.
  expect_parity(spec("ddp"), strategies(), [](auto world) {
    const std::chrono::microseconds latency(300 * (1 + world->rank() % 4));
    return comm::slow_links(std::move(world), {.link = {latency, 20e6}, .intra = {}, .hosts = 1});
  });
}

/// A layer that is used twice, one that only the batches of odd ranks use, and two that share a weight of odd size.
class PartlyUsed final : public nn::Layer<PartlyUsed> {
 public:
  explicit PartlyUsed(nn::Context& context)
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
Values train_partly_used(const std::string& backend, const std::string& strategy, int ranks) {
  Values result;
  comm::InitOptions config;
  config.backend = backend;
  config.timeout = std::chrono::seconds(30);
  comm::run_threads(ranks, config, [&](comm::Communicator& world) {
    nn::Context context({.threads = 1, .memory_tracker = world.memory_tracker(), .memory = {}, .make_stream = {}});
    PartlyUsed model(context);
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
    engine.state().for_each_parameter([&](const fsdp::Parameter& parameter, std::span<const float> values) {
      if (world.rank() == 0) result[parameter.name()].assign(values.begin(), values.end());
    });
  });
  return result;
}

TEST_P(Acceptance, P08_UnusedAndRepeatedModulesTrainAsUnderDdp) {
  const auto ddp = train_partly_used(backend(), "ddp", ranks());
  for (const std::string& name : strategies()) EXPECT_TRUE(train_partly_used(backend(), name, ranks()) == ddp) << name;
  // A parameter that no rank uses keeps its value; one that a rank skips is updated from the other ranks' gradients.
  const auto one = train_partly_used(backend(), "ddp", 1);
  EXPECT_EQ(ddp.at("never.weight"), one.at("never.weight"));
  EXPECT_FALSE(ddp.at("sometimes.weight") == one.at("never.weight"));
}

TEST_P(Acceptance, P08_FrozenParametersStayAndOthersTrainAsUnderDdp) {
  std::optional<TrainingRecord> ddp;
  for (const std::string& name : strategies()) {
    TrainingSpec one = spec(name);
    one.model = uneven_model();  // tied embeddings of 257 rows
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

TEST_P(Acceptance, P11_InfinityOnOneRankSkipsStepOnAll) {
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
    Values before, after;
    one.after_step = [&](int rank, int step, Engine& engine, nn::CausalModel&) {
      auto& values = step == 0 ? before : after;
      engine.state().for_each_parameter([&](const fsdp::Parameter& p, std::span<const float> v) {
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

TEST_P(Acceptance, P17_OverlappedAndSerialRunsAreBitwiseEqual) {
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

TEST_P(Acceptance, P18_NothingReadsReleasedMemory) {
  for (const std::string& name : strategies()) {
    TrainingSpec one = spec(name);
    const TrainingRecord plain = train(one);
    one.engine.poison = true;
    one.lazy_streams = true;
    EXPECT_TRUE(same_bits(plain, train(one))) << name;
  }
}

TEST_P(Acceptance, P20_ModelMayMixStrategies) {
  const TrainingRecord ddp = train(spec("ddp"));
  TrainingSpec one = spec("fsdp");
  one.engine.unit_strategy = [](const UnitSpec& unit) {
    return unit.name == "h.1" ? std::optional(strategy_named("ddp")) : std::nullopt;
  };
  EXPECT_TRUE(same_bits(ddp, train(one)));
}

}  // namespace
}  // namespace tessera::fsdp
