// Two libtorch models, and trainings of them with and without an engine.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/comm/init.h"
#include "tessera/libtorch/engine.h"

namespace tessera::libtorch::test {

/// Dropout draws from a generator of the rank's own: ranks here are threads, and libtorch's default one is shared.
struct LayerImpl : torch::nn::Module {
  LayerImpl(std::int64_t in, std::int64_t out, at::Generator random)
      : linear(register_module("linear", torch::nn::Linear(in, out))),
        norm(register_module("norm", torch::nn::BatchNorm1d(out))),
        random_(std::move(random)) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor y = torch::relu(norm->forward(linear->forward(x).to(torch::kFloat))).to(x.scalar_type());
    if (!is_training()) return y;
    return y * torch::empty(y.sizes()).bernoulli_(0.75, random_).to(y.options()) / 0.75;
  }
  torch::nn::Linear linear;
  torch::nn::BatchNorm1d norm;

 private:
  at::Generator random_;
};
TESSERA_UNIT(Layer);

/// Every rank gets the whole batch: its statistics are those of the world of one.
struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    const at::Generator random = at::detail::createCPUGenerator(5);
    layers = register_module("layers", torch::nn::Sequential(Layer(7, 13, random), Layer(13, 11, random)));
    head = register_module("head", torch::nn::Linear(11, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) { return head->forward(layers->forward(x)); }
  torch::Tensor loss(int step, int /*rank*/, int /*ranks*/) {
    const torch::Tensor x = torch::sin(torch::arange(8 * 7, torch::kFloat).reshape({8, 7}) + step);
    return forward_of(x.to(head->weight.options())).to(torch::kFloat).square().mean();
  }
  std::function<torch::Tensor(torch::Tensor)> forward_of;
  torch::nn::Sequential layers = nullptr;
  torch::nn::Linear head = nullptr;
};
TESSERA_UNIT(Mlp);

constexpr std::int64_t kWidth = 16, kHeads = 2, kWords = 29;

struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : norm_1(register_module("norm_1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        norm_2(register_module("norm_2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        inputs(register_module("inputs", torch::nn::Linear(kWidth, 3 * kWidth))),
        outputs(register_module("outputs", torch::nn::Linear(kWidth, kWidth))),
        up(register_module("up", torch::nn::Linear(kWidth, 4 * kWidth))),
        down(register_module("down", torch::nn::Linear(4 * kWidth, kWidth))) {}
  torch::Tensor forward(torch::Tensor x) {
    const std::int64_t sequences = x.size(0), positions = x.size(1);
    std::vector<torch::Tensor> parts = inputs->forward(norm_1->forward(x)).chunk(3, -1);
    for (torch::Tensor& part : parts) part = part.view({sequences, positions, kHeads, -1}).transpose(1, 2);
    const torch::Tensor scores = torch::matmul(parts[0], parts[1].transpose(-2, -1)) / 2.0;
    const torch::Tensor mixed = torch::matmul(torch::softmax(scores, -1), parts[2]).transpose(1, 2);
    x = x + outputs->forward(mixed.reshape({sequences, positions, kWidth}));
    return x + down->forward(torch::gelu(up->forward(norm_2->forward(x))));
  }
  torch::nn::LayerNorm norm_1, norm_2;
  torch::nn::Linear inputs, outputs, up, down;
};
TESSERA_UNIT(Block);

/// The head uses the embedding's weight. `unused` is a parameter without gradient.
struct TransformerImpl : torch::nn::Module {
  TransformerImpl()
      : words(register_module("words", torch::nn::Embedding(kWords, kWidth))),
        blocks(register_module("blocks", torch::nn::ModuleList(Block(), Block()))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))) {
    register_parameter("unused", torch::ones({5}));
    register_parameter("tied", words->weight);
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    torch::Tensor x = words->forward(tokens);
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return torch::matmul(norm->forward(x), words->weight.t());
  }
  torch::Tensor loss(int step, int rank, int ranks) {
    const torch::Tensor all = (torch::arange(4 * 6).reshape({4, 6}) * 5 + 3 * step) % kWords;
    const torch::Tensor tokens = all.narrow(0, 4 / ranks * rank, 4 / ranks).to(words->weight.device());
    return torch::nn::functional::cross_entropy(forward_of(tokens).to(torch::kFloat).flatten(0, 1),
                                                ((tokens * 2 + 1) % kWords).flatten());
  }
  std::function<torch::Tensor(torch::Tensor)> forward_of;
  torch::nn::Embedding words;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
};
TESSERA_UNIT(Transformer);

/// The same values on every rank: one after the other, because libtorch's default generator is shared.
template <class Model>
Model make(at::ScalarType dtype = torch::kFloat) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(7);
  Model model;
  if (dtype != torch::kFloat) {
    model->to(dtype);
    for (const auto& module : model->modules())
      if (auto* const norm = module->template as<torch::nn::BatchNorm1d>()) norm->to(torch::kFloat);
  }
  model->forward_of = [held = model.operator->()](torch::Tensor x) { return held->forward(x); };
  return model;
}

using Values = std::map<std::string, std::vector<float>>;

inline std::vector<float> floats(const torch::Tensor& tensor) {
  const torch::Tensor all = tensor.detach().to(torch::kFloat).cpu().contiguous();
  return {all.data_ptr<float>(), all.data_ptr<float>() + all.numel()};
}

struct Trained {
  std::vector<float> losses;  // of rank 0
  Values values;
  std::uint64_t copied_bytes = 0;
  bool operator==(const Trained&) const = default;
};

struct Spec {
  std::string strategy = "fsdp";
  int ranks = 1;
  at::ScalarType dtype = torch::kFloat;
  int microbatches = 1, steps = 3;
  fsdp::EngineOptions options = {};
  std::string all_gather = "plain";
  std::string backend = "shm";
  std::function<fsdp::ProgramOptimizer()> optimizer = {};  // of each rank; empty: the engine's
};

/// Runs `body` on threads that are ranks, each with one thread of libtorch's.
inline void run_ranks(int ranks, const std::function<void(comm::Communicator&)>& body,
                      const std::string& backend = "shm") {
  comm::InitOptions config;
  config.backend = backend;
  comm::run_threads(ranks, config, [&](comm::Communicator& world) {
    at::set_num_threads(1);
    body(world);
  });
}

/// The message of the InvalidUsage that `work` throws on one rank.
inline std::string refused(const std::function<void(comm::Communicator&)>& work) {
  std::string message;
  run_ranks(1, [&](comm::Communicator& world) {
    try {
      work(world);
    } catch (const base::InvalidUsage& error) {
      message = error.what();
    }
  });
  return message;
}

inline fsdp::EngineOptions with(const std::string& strategy, fsdp::EngineOptions options = {}) {
  options.strategy = fsdp::strategy_named(strategy);
  return options;
}

template <class Model>
void train_steps(const Spec& spec, Model& model, Engine& engine, comm::Communicator& world, Trained& seen) {
  for (int step = 0; step < spec.steps; ++step) {
    for (int i = 1; i <= spec.microbatches; ++i) {
      engine.set_is_last_backward(i == spec.microbatches);
      const torch::Tensor loss = model->loss(10 * step + i, world.rank(), world.size()) / spec.microbatches;
      loss.backward();
      seen.losses.push_back(loss.template item<float>());
    }
    engine.step(1e-2);
  }
}

template <class Model>
Trained train(const Spec& spec) {
  Trained seen;
  const auto run = [&](comm::Communicator& world) {
    Model model = make<Model>(spec.dtype);
    fsdp::EngineOptions options = spec.options;
    if (spec.optimizer) options.program_optimizer = spec.optimizer();
    options.strategy = fsdp::strategy_named(spec.strategy);
    options.strategy.all_gather = spec.all_gather;
    options.poison = true;
    Engine engine(*model, world, options);
    Trained mine;
    train_steps(spec, model, engine, world, mine);
    mine.copied_bytes = engine.stats().copied_bytes();
    for (const auto& [name, tensor] : engine.state_dict()) mine.values[name] = floats(tensor);
    if (world.rank() == 0) seen = mine;
  };
  run_ranks(spec.ranks, run, spec.backend);
  return seen;
}

}  // namespace tessera::libtorch::test
