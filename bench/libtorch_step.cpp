// Trains a libtorch transformer, by torch::optim::AdamW alone or with an engine, and prints the speed and the memory of
// a step as a line of JSON.
//
//   bench_libtorch_step [--strategy plain|ddp|fsdp|..] [--device cuda] [--precision bf16] [--width 256] [--layers 4] ..
//   tessera run -n 2 -- bench_libtorch_step --strategy fsdp
#include <sys/resource.h>
#include <torch/cuda.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/init.h"
#include "tessera/libtorch/engine.h"

using namespace tessera;
using torch::Tensor;

namespace {

struct Options {
  std::string strategy = "plain", device = "cpu", precision = "f32";
  std::int64_t width = 256, heads = 4, layers = 4, words = 8192, batch = 8, positions = 256;
  int steps = 12, threads = 1;
  bool checkpointed = false;
};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const Options& options)
      : inputs(register_module("inputs", torch::nn::Linear(options.width, 3 * options.width))),
        outputs(register_module("outputs", torch::nn::Linear(options.width, options.width))),
        up(register_module("up", torch::nn::Linear(options.width, 4 * options.width))),
        down(register_module("down", torch::nn::Linear(4 * options.width, options.width))),
        norm_1(register_module("norm_1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})))),
        norm_2(register_module("norm_2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})))),
        heads(options.heads) {}
  Tensor forward(Tensor x) {
    std::vector<Tensor> parts = inputs(norm_1(x)).chunk(3, -1);
    for (Tensor& part : parts) part = part.view({x.size(0), x.size(1), heads, -1}).transpose(1, 2);
    const Tensor scores =
        torch::matmul(parts[0], parts[1].transpose(-2, -1)) / std::sqrt(static_cast<double>(x.size(2) / heads));
    const Tensor mixed = torch::matmul(torch::softmax(scores, -1), parts[2]).transpose(1, 2);
    x = x + outputs(mixed.reshape(x.sizes()));
    return x + down(torch::gelu(up(norm_2(x))));
  }
  torch::nn::Linear inputs, outputs, up, down;
  torch::nn::LayerNorm norm_1, norm_2;
  const std::int64_t heads;
};
TESSERA_UNIT(Block);

struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(const Options& options)
      : words(register_module("words", torch::nn::Embedding(options.words, options.width))),
        blocks(register_module("blocks", torch::nn::Sequential())),
        head(register_module("head", torch::nn::Linear(options.width, options.words))) {
    for (std::int64_t i = 0; i < options.layers; ++i) blocks->push_back(Block(options));
  }
  Tensor forward(const Tensor& tokens) {
    return torch::nn::functional::cross_entropy(head(blocks->forward(words(tokens))).flatten(0, 1), tokens.flatten());
  }
  torch::nn::Embedding words;
  torch::nn::Sequential blocks;
  torch::nn::Linear head;
};
TESSERA_UNIT(Transformer);

/// The largest that the process has been, in bytes.
long long peak_resident() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  return 1024LL * used.ru_maxrss;
}

void train(const Options& options) {
  const base::Device device = base::parse_device(options.device);
  const std::shared_ptr<comm::Communicator> world =
      comm::init({.device = device.type == base::DeviceType::cpu ? nullptr : base::open_device(device)});
  torch::manual_seed(1);
  torch::set_num_threads(options.threads);
  const long long before = peak_resident();
  Transformer model(options);
  if (options.checkpointed) libtorch::checkpoint_activations(*model);
  model->to(torch::Device(options.device), options.precision == "bf16" ? torch::kBFloat16 : torch::kFloat);
  std::optional<libtorch::Engine> engine;
  std::optional<torch::optim::AdamW> optimizer;
  if (options.strategy == "plain")
    optimizer.emplace(model->parameters(), torch::optim::AdamWOptions(1e-3));
  else
    engine.emplace(*model, *world, fsdp::EngineOptions{.strategy = fsdp::strategy_named(options.strategy)});
  const Tensor tokens =
      torch::randint(options.words, {options.batch, options.positions}, torch::TensorOptions(torch::kLong))
          .to(torch::Device(options.device));
  std::vector<double> seconds;
  double last = 0;
  for (int step = 0; step < options.steps; ++step) {
    const auto begin = std::chrono::steady_clock::now();
    const Tensor loss = model(tokens);
    loss.backward();
    if (engine) {
      engine->step(1e-3);
    } else {
      optimizer->step();
      optimizer->zero_grad();
    }
    last = loss.item<double>();  // waits for the device
    if (step >= 2) seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(seconds.begin(), seconds.end());
  const double step = seconds[seconds.size() / 2];
  std::uint64_t peak = 0;
  if (engine)
    peak = engine->model().runtime().memory_tracker().snapshot().total_peak +
           world->memory_tracker()->snapshot().total_peak;
  if (world->rank() == 0)
    std::printf(
        "{\"strategy\":\"%s\",\"ranks\":%d,\"tokens_per_second\":%.1f,\"step_ms\":%.3f,\"loss\":%.4f,"
        "\"peak_bytes\":%llu,\"resident_bytes\":%lld,\"resident_before\":%lld}\n",
        options.strategy.c_str(), world->size(),
        static_cast<double>(world->size() * options.batch * options.positions) / step, step * 1e3, last,
        static_cast<unsigned long long>(peak), peak_resident(), before);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Time a training step of a libtorch model, with and without an engine.");
  app.add_option("--strategy", options.strategy, "plain, or a strategy of an engine")->capture_default_str();
  app.add_option("--device", options.device)->capture_default_str();
  app.add_option("--precision", options.precision)->check(CLI::IsMember({"f32", "bf16"}))->capture_default_str();
  app.add_flag("--checkpoint-activations", options.checkpointed, "recompute blocks in backward");
  app.add_option("--width", options.width)->capture_default_str();
  app.add_option("--heads", options.heads)->capture_default_str();
  app.add_option("--layers", options.layers)->capture_default_str();
  app.add_option("--words", options.words)->capture_default_str();
  app.add_option("--batch", options.batch, "sequences of each rank")->capture_default_str();
  app.add_option("--positions", options.positions)->capture_default_str();
  app.add_option("--steps", options.steps)->check(CLI::Range(3, 100000))->capture_default_str();
  app.add_option("--threads", options.threads, "of libtorch")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    train(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_libtorch_step: %s\n", error.what());
    return 2;
  }
  return 0;
}
