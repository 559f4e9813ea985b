// Activation checkpointing of TESSERA_UNITs: the same bits, computed twice.
#include <gtest/gtest.h>
#include <torch/nn/modules/dropout.h>

#include <atomic>

#include "tests/libtorch/models.h"

namespace tessera::libtorch::test {
namespace {

std::atomic<int> calls = 0;

struct CountedImpl : torch::nn::Module {
  explicit CountedImpl(bool with_inner);
  std::tuple<torch::Tensor, std::int64_t> forward(const torch::Tensor& x, double scale = 1);
  torch::nn::Linear linear;
  torch::nn::Dropout dropout;
  std::shared_ptr<torch::nn::Module> inner;
};
TESSERA_UNIT(Counted);

CountedImpl::CountedImpl(bool with_inner)
    : linear(register_module("linear", torch::nn::Linear(8, 8))),
      dropout(register_module("dropout", torch::nn::Dropout(0.3))) {
  if (with_inner) inner = register_module("inner", Counted(false).ptr());
}

std::tuple<torch::Tensor, std::int64_t> CountedImpl::forward(const torch::Tensor& x, double scale) {
  ++calls;
  torch::Tensor y = dropout(torch::tanh(linear(x))) * scale;
  if (inner != nullptr) y = y + std::get<0>(inner->as<Counted>()->forward(y, 1));
  return {x + y, x.size(0)};
}

/// Its blocks contain units; the first gets an input without gradient.
struct NetImpl : torch::nn::Module {
  NetImpl()
      : blocks(register_module("blocks", torch::nn::ModuleList(Counted(true), Counted(false), Counted(true)))),
        head(register_module("head", torch::nn::Linear(8, 1))) {}
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& block : *blocks) x = std::get<0>(block->as<Counted>()->forward(x, 0.5));
    return head(x).square().mean();
  }
  torch::nn::ModuleList blocks;
  torch::nn::Linear head;
};
TESSERA_UNIT(Net);

Net make_net() {
  torch::manual_seed(3);
  return Net();
}

torch::Tensor batch(int step) { return torch::sin(torch::arange(4 * 8, torch::kFloat).reshape({4, 8}) + step); }

std::vector<std::vector<float>> gradients_of(Net& model) {
  torch::manual_seed(5);
  model->forward(batch(0)).backward();
  std::vector<std::vector<float>> all;
  for (const torch::Tensor& parameter : model->parameters()) all.push_back(floats(parameter.grad()));
  return all;
}

TEST(LibtorchCheckpoint, GivesTheSameGradientsWithoutAnEngine) {
  Net plain = make_net(), checkpointed = make_net();
  EXPECT_EQ(checkpoint_activations(*checkpointed), 3);
  calls = 0;
  const auto expected = gradients_of(plain);
  EXPECT_EQ(calls, 5);
  EXPECT_EQ(gradients_of(checkpointed), expected);
  EXPECT_EQ(calls, 5 + 10);
  Net nested = make_net();
  EXPECT_EQ(
      checkpoint_activations(*nested, [](const auto& module) { return module.template as<Counted>() != nullptr; }), 5);
  const auto close = gradients_of(nested);  // an inner unit's gradient is added to its input's in another order
  for (std::size_t i = 0; i < expected.size(); ++i)
    for (std::size_t k = 0; k < expected[i].size(); ++k) EXPECT_NEAR(close.at(i).at(k), expected[i][k], 1e-6);
  EXPECT_EQ(calls, 15 + 12) << "an inner unit is computed three times";
  {
    const torch::NoGradGuard no_grad;
    checkpointed->forward(batch(1));
  }
  EXPECT_EQ(calls, 27 + 5) << "nothing to recompute";
}

Values train_net(const std::string& strategy, int ranks, bool checkpointed) {
  Values values;
  static std::mutex mutex;
  run_ranks(ranks, [&](comm::Communicator& world) {
    std::unique_lock lock(mutex);
    Net model = make_net();
    model->apply([](torch::nn::Module& module) {  // ranks are threads, which share the default generator
      if (auto* const dropout = module.as<torch::nn::Dropout>()) dropout->options.p(0);
    });
    if (checkpointed) checkpoint_activations(*model);
    lock.unlock();
    Engine engine(*model, world, with(strategy, {.poison = true}));
    for (int step = 0; step < 3; ++step) {
      model->forward(batch(step + world.rank())).backward();
      engine.step(1e-2);
    }
    EXPECT_EQ(engine.stats().copied_bytes(), 0U);
    for (const auto& [name, tensor] : engine.state_dict())
      if (world.rank() == 0) values[name] = floats(tensor);
  });
  return values;
}

TEST(LibtorchCheckpoint, EveryStrategyEndsWithTheSameBits) {
  for (const int ranks : {1, 2, 3}) {
    const Values expected = train_net("ddp", ranks, false);
    for (const char* const strategy : {"ddp", "zero1", "zero2", "fsdp"})
      EXPECT_EQ(train_net(strategy, ranks, true), expected) << strategy << " on " << ranks;
  }
}

TEST(LibtorchCheckpoint, AnotherGeneratorIsNotRepeated) {
  const auto train_mlp = [](bool checkpointed) {
    Mlp model = make<Mlp>();
    if (checkpointed) checkpoint_activations(*model);
    model->loss(0, 0, 1).backward();
    return floats(model->parameters().front().grad());
  };
  EXPECT_EQ(train_mlp(false), train_mlp(false));
  EXPECT_NE(train_mlp(true), train_mlp(false)) << "the control: these gradients are compared at all";
}

struct SpectrumImpl : torch::nn::Module {
  SpectrumImpl() : linear(register_module("linear", torch::nn::Linear(8, 8))) {}
  torch::Tensor forward(const torch::Tensor& absent, const torch::Tensor& x) {
    EXPECT_FALSE(absent.defined());
    return torch::complex(linear(x), x);
  }
  torch::nn::Linear linear;
};
TESSERA_UNIT(Spectrum);

TEST(LibtorchCheckpoint, TakesAbsentArgumentsAndComplexResults) {
  const auto gradient_of = [](bool checkpointed) {
    torch::manual_seed(3);
    torch::nn::ModuleList model{Spectrum()};
    if (checkpointed) checkpoint_activations(*model);
    torch::abs(model[0]->as<Spectrum>()->forward(torch::Tensor(), batch(0))).sum().backward();
    return floats(model->parameters().front().grad());
  };
  EXPECT_EQ(gradient_of(true), gradient_of(false));
}

TEST(LibtorchCheckpoint, MisuseIsNamed) {
  const auto message_of = [](const std::function<void()>& work) -> std::string {
    try {
      work();
    } catch (const base::InvalidUsage& error) {
      return error.what();
    }
    return "";
  };
  Net model = make_net();
  EXPECT_EQ(message_of([&] { checkpoint_activations(*model, [](const auto&) { return false; }); }),
            "checkpoint_activations: no module was selected");
  EXPECT_NE(
      message_of([&] { checkpoint_activations(*model, [](const auto&) { return true; }); }).find("no TESSERA_UNIT"),
      std::string::npos);
  EXPECT_EQ(message_of([&] { checkpoint_activations(*model->head); }),
            "checkpoint_activations: the model has no TESSERA_UNIT below it");
  checkpoint_activations(*model);
  const torch::Tensor x = batch(0) + torch::ones({1}, torch::requires_grad());
  torch::Tensor input = x * 2;
  const torch::Tensor loss = model->forward(input);
  {
    const torch::NoGradGuard no_grad;
    input.add_(1);
  }
  EXPECT_EQ(message_of([&] { loss.backward(); }),
            "backward: an input of a checkpointed call was changed in place after the call");
  EXPECT_THROW(model->forward(batch(0)).backward({}, /*retain_graph=*/true, /*create_graph=*/true), base::Unsupported);
}

}  // namespace
}  // namespace tessera::libtorch::test
