// libtorch models under every strategy: one result, which is that of the plain program.
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include "tessera/nn/context.h"
#include "tessera/nn/optimizer.h"
#include "tests/libtorch/models.h"

namespace tessera::libtorch::test {
namespace {

constexpr const char* kStrategies[] = {"ddp", "zero1", "zero2", "fsdp", "hsdp"};

/// A plain libtorch loop with the update of the engine, in place of torch::optim's: that rounds otherwise.
template <class Model>
Trained train_plainly(const Spec& spec) {
  at::set_num_threads(1);
  nn::Context context;
  Model model = make<Model>(spec.dtype);
  struct State {
    torch::Tensor values, first, second;  // of half-precision parameters the f32 master weights
  };
  std::map<std::string, State> states;
  for (const auto& item : model->named_parameters()) {
    const torch::Tensor values = item.value().detach().to(torch::kFloat);  // those of f32 themselves
    states[item.key()] = {values, torch::zeros_like(values), torch::zeros_like(values)};
  }
  Trained seen;
  for (int step = 0; step < spec.steps; ++step) {
    const torch::Tensor loss = model->loss(10 * step + 1, 0, 1);
    loss.backward();
    seen.losses.push_back(loss.template item<float>());
    for (const auto& item : model->named_parameters()) {
      torch::Tensor parameter = item.value();
      if (item.key() == "words.weight") continue;  // under its first name, "tied"
      if (!parameter.grad().defined()) parameter.mutable_grad() = torch::zeros_like(parameter);
      State& state = states.at(item.key());
      base::OptimizerRange range{
          .values = state.values.template data_ptr<float>(),
          .state = {state.first.template data_ptr<float>(), state.second.template data_ptr<float>()},
          .count = parameter.numel(),
          .decay = parameter.dim() >= 2};
      if (parameter.scalar_type() == torch::kFloat)
        range.gradients = parameter.grad().template data_ptr<float>();
      else
        range.half = {base::DType::bf16, parameter.grad().data_ptr(), parameter.data_ptr()};
      nn::update(context, {}, {.number = static_cast<std::uint64_t>(step + 1), .learning_rate = 1e-2}, range);
    }
    for (torch::Tensor& parameter : model->parameters()) parameter.mutable_grad().reset();
  }
  for (const auto& item : model->named_parameters())
    if (item.key() != "words.weight") seen.values[item.key()] = floats(states.at(item.key()).values);
  for (const auto& item : model->named_buffers()) seen.values[item.key()] = floats(item.value());
  return seen;
}

template <class Model>
class LibtorchEquality : public testing::Test {};
using Models = testing::Types<Mlp, Transformer>;
TYPED_TEST_SUITE(LibtorchEquality, Models);

/// torch::optim::AdamW on the shards of a rank. Its state is as large as they are.
fsdp::ProgramOptimizer torch_adamw() {
  struct Shard {
    torch::Tensor values;
    std::shared_ptr<torch::optim::AdamW> optimizer;
  };
  const auto shards = std::make_shared<std::map<const void*, Shard>>();
  const auto update = [shards](const fsdp::OptimizerShard& shard, const base::OptimizerStep& step) {
    const auto tensor = [&](const void* data) {
      return torch::from_blob(const_cast<void*>(data), {shard.range.count()});
    };
    Shard& own = (*shards)[shard.values];
    if (own.optimizer == nullptr) {
      own.values = tensor(shard.values);
      own.optimizer = std::make_shared<torch::optim::AdamW>(std::vector<torch::Tensor>{own.values},
                                                            torch::optim::AdamWOptions(step.learning_rate));
    }
    own.values.mutable_grad() = tensor(shard.gradients);
    own.optimizer->step();
  };
  return {.slots = 0, .update = update};
}

/// Gradients of bf16 are reduced in f32: hsdp reduces in two stages, and would round twice.
template <class Model>
void expect_one_result(Spec spec) {
  spec.options.reduce_dtype = base::DType::f32;
  spec.strategy = "ddp";
  const Trained expected = train<Model>(spec);
  EXPECT_EQ(expected.copied_bytes, 0U);
  EXPECT_LT(expected.losses.back(), expected.losses.front());
  for (const char* const backend : {"shm", "tcp"})
    for (const char* const strategy : kStrategies) {
      if (strategy == std::string("hsdp") && spec.ranks % 2 == 1) continue;  // it needs replicas of several ranks
      spec.backend = backend;
      spec.strategy = strategy;
      EXPECT_EQ(train<Model>(spec), expected)
          << strategy << " over " << backend << " on " << spec.ranks << " ranks in " << spec.dtype;
    }
}

TYPED_TEST(LibtorchEquality, EveryStrategyEndsWithTheSameBits) {
  for (const at::ScalarType dtype : {torch::kFloat, torch::kBFloat16})
    for (const int ranks : {1, 2, 3, 4}) expect_one_result<TypeParam>({.ranks = ranks, .dtype = dtype});
}

TYPED_TEST(LibtorchEquality, EveryStrategyEndsWithTheSameBitsByTorchsAdamW) {
  for (const at::ScalarType dtype : {torch::kFloat, torch::kBFloat16})
    for (const int ranks : {1, 2, 3, 4})
      expect_one_result<TypeParam>({.ranks = ranks, .dtype = dtype, .optimizer = torch_adamw});
  const Trained own = train<TypeParam>({.ranks = 2}), other = train<TypeParam>({.ranks = 2, .optimizer = torch_adamw});
  EXPECT_NE(own, other) << "the control: it rounds otherwise, and decays all parameters";
}

TYPED_TEST(LibtorchEquality, WorldOfOneIsThePlainProgram) {
  for (const at::ScalarType dtype : {torch::kFloat, torch::kBFloat16})
    for (const char* const strategy : {"ddp", "fsdp"}) {
      Trained plain = train_plainly<TypeParam>({.dtype = dtype});
      const Trained one = train<TypeParam>({.strategy = strategy, .dtype = dtype});
      EXPECT_EQ(one.losses, plain.losses) << strategy << " in " << dtype;
      if (dtype == torch::kFloat) {
        EXPECT_EQ(one.values, plain.values) << strategy;
      }
    }
}

/// With SGD: AdamW turns the rounding of gradients that are zero but for it into steps.
TYPED_TEST(LibtorchEquality, FourRanksFollowOne) {
  const fsdp::EngineOptions options{.optimizer = {.kind = base::OptimizerConfig::Kind::sgd}};
  const Trained one = train<TypeParam>({.options = options}), four = train<TypeParam>({.ranks = 4, .options = options});
  if constexpr (std::is_same_v<TypeParam, Mlp>) {  // every rank computes the same loss
    for (std::size_t i = 0; i < one.losses.size(); ++i) EXPECT_NEAR(one.losses.at(i), four.losses.at(i), 1e-6);
  }
  for (const auto& [name, values] : one.values)
    for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], four.values.at(name).at(i), 1e-6) << name;
}

}  // namespace
}  // namespace tessera::libtorch::test
