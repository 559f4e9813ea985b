// Models with tensors, modules and units as programs have them, beside plain libtorch.
#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/optim/sgd.h>

#include <algorithm>

#include "tests/libtorch/models.h"

namespace tessera::libtorch::test {
namespace {

/// Tensors as programs have them: a causal mask that is a view, a table in f64, parameters without elements or axes.
struct OddImpl : torch::nn::Module {
  OddImpl()
      : mask(register_buffer("mask", torch::tril(torch::ones({3, 3})).to(torch::kBool).view({1, 3, 3}))),
        table(register_buffer("table", torch::arange(3, torch::kDouble).view({1, 1, 3}))),
        weight(register_parameter("weight", torch::arange(9, torch::kFloat).div(9).view({3, 3}))),
        scale(register_parameter("scale", torch::full({}, 2.0))) {
    mix = register_module("mix", torch::nn::Linear(torch::nn::LinearOptions(3, 3).bias(false)));
    torch::nn::init::constant_(mix->weight, 0.5);
    register_parameter("none", torch::empty({0}));
    register_parameter("no_rows", torch::empty({0, 4}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor mixed = (torch::matmul(mix->forward(x), weight) * scale).masked_fill(mask.logical_not(), -1.0);
    return (mixed.to(torch::kDouble) * table).to(torch::kFloat);
  }
  torch::Tensor mask, table, weight, scale;
  torch::nn::Linear mix = nullptr;
};
TESSERA_UNIT(Odd);

TEST(LibtorchPlain, TensorsOfAllKindsTrainAsInPlainLibtorch) {
  const torch::Tensor x = torch::sin(torch::arange(9, torch::kFloat)).reshape({1, 3, 3});
  Odd plain;
  torch::optim::SGD optimizer(plain->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    plain->forward(x).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  for (const char* const strategy : {"ddp", "fsdp"})
    run_ranks(2, [&](comm::Communicator& world) {
      Odd model;
      Engine engine(*model, world,
                    with(strategy, {.wrap = "none", .optimizer = {.kind = base::OptimizerConfig::Kind::sgd}}));
      for (int step = 0; step < 3; ++step) {
        model->forward(x).square().mean().backward();
        engine.step(0.1);
      }
      const auto values = engine.state_dict();
      EXPECT_EQ(values.size(), 7U);
      for (const auto& item : plain->named_parameters())
        EXPECT_TRUE(torch::allclose(values.at(item.key()), item.value(), 1e-5, 1e-7)) << item.key() << " " << strategy;
      for (const auto& item : plain->named_buffers())
        EXPECT_TRUE(values.at(item.key()).equal(item.value())) << item.key() << " " << strategy;
    });
}

struct HalfImpl : torch::nn::Module {
  explicit HalfImpl(const torch::nn::Linear& both)
      : own(register_module("own", torch::nn::Linear(5, 5))), shared(register_module("shared", both)) {}
  torch::Tensor forward(const torch::Tensor& x) { return shared->forward(torch::tanh(own->forward(x))); }
  torch::nn::Linear own, shared;
};
TESSERA_UNIT(Half);

/// Two calls of one unit, or two units with a module in common.
struct HalvesImpl : torch::nn::Module {
  explicit HalvesImpl(bool twice) {
    torch::manual_seed(3);
    const torch::nn::Linear both(5, 5);
    const Half first(both);
    halves = register_module("halves", torch::nn::Sequential(first, twice ? first : Half(both)));
  }
  torch::Tensor forward(const torch::Tensor& x) { return halves->forward(x); }
  torch::nn::Sequential halves = nullptr;
};
TESSERA_UNIT(Halves);

/// The values have the sum of the gradients of all calls, as in plain libtorch.
TEST(LibtorchPlain, ModulesAndUnitsCanBeUsedTwice) {
  const torch::Tensor x = torch::sin(torch::arange(10, torch::kFloat)).reshape({2, 5});
  for (const bool twice : {false, true}) {
    Halves plain(twice);
    std::map<std::string, torch::Tensor> parameters;  // once each, with the first name
    for (const auto& item : plain->named_parameters())
      if (std::ranges::none_of(parameters, [&](const auto& known) { return known.second.is_same(item.value()); }))
        parameters[item.key()] = item.value();
    std::vector<torch::Tensor> tensors;
    for (const auto& [name, tensor] : parameters) tensors.push_back(tensor);
    torch::optim::SGD optimizer(tensors, 0.1);
    for (int step = 0; step < 3; ++step) {
      plain->forward(x).square().mean().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    for (const char* const strategy : {"ddp", "zero2", "fsdp"})
      run_ranks(2, [&](comm::Communicator& world) {
        Halves model = nullptr;
        {
          static std::mutex generator;
          const std::lock_guard lock(generator);
          model = Halves(twice);
        }
        Engine engine(*model, world, with(strategy, {.optimizer = {.kind = base::OptimizerConfig::Kind::sgd}}));
        for (int step = 0; step < 3; ++step) {
          model->forward(x).square().mean().backward();
          engine.step(0.1);
        }
        const auto values = engine.state_dict();
        EXPECT_EQ(values.size(), parameters.size());
        for (const auto& [name, value] : values)
          EXPECT_TRUE(torch::allclose(value, parameters.at(name), 1e-5, 1e-7))
              << name << (twice ? " of one unit called twice" : " of two units") << " under " << strategy;
      });
  }
}

}  // namespace
}  // namespace tessera::libtorch::test
