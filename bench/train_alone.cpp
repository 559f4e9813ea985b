// Trains a preset without the engine on random tokens, and prints the cost of a step as a line of JSON: the counterpart
// of PyTorch's figures in docs/performance.md, and the baseline of the engine's cost.
//
//   bench_train_alone [MODEL] [BATCH] [POSITIONS] [STEPS] [THREADS] [--device cuda] [--precision bf16]
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/nn/host_access.h"
#include "tessera/nn/models/causal_model.h"
#include "tessera/nn/optimizer.h"

using namespace tessera::nn;

namespace {

struct Options {
  std::string model = "gpt-mini", device = "cpu", precision = "f32";
  std::int64_t batch = 8, positions = 256;
  int steps = 12, threads = 1;
};

Tensor random_tokens(Context& context, const Options& options, std::int64_t vocabulary) {
  Tensor tokens = Tensor::empty(context, {options.batch, options.positions}, DType::i32);
  upload(context, tokens.raw(), tokens.bytes(), [&](void* to) {
    std::mt19937 random(1);
    for (std::int64_t i = 0; i < tokens.count(); ++i)
      static_cast<std::int32_t*>(to)[i] = static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(vocabulary));
  });
  return tokens;
}

/// By the stream's own clock, in milliseconds.
struct StepTimes {
  double forward = 0, backward = 0, whole = 0;
};

double between(const tessera::base::Event& from, const tessera::base::Event& to) {
  return static_cast<double>(to.time_ns() - from.time_ns()) * 1e-6;
}

double median_of(std::vector<StepTimes> times, double StepTimes::*what) {
  std::sort(times.begin(), times.end(), [&](const auto& a, const auto& b) { return a.*what < b.*what; });
  return times[times.size() / 2].*what;
}

void train(const Options& options) {
  const ModelConfig config = preset(options.model);
  Context context({.threads = options.threads, .device = tessera::base::parse_device(options.device)});
  const auto model = make_model(context, config);
  if (options.precision == "bf16") model->set_dtype(DType::bf16);
  model->materialize(0);
  Optimizer optimizer(*model, {});
  const Tensor tokens = random_tokens(context, options, config.vocabulary);
  std::vector<StepTimes> times;
  double last = 0;
  for (int step = 0; step < options.steps; ++step) {
    const auto begin = context.stream().record_timed();
    Tape tape;
    const TapeScope scope(context, &tape);
    const Tensor loss = model->loss(tokens, tokens);
    const auto middle = context.stream().record_timed();
    tape.backward(loss);
    const auto end = context.stream().record_timed();
    optimizer.step(1e-3);
    const auto done = context.stream().record_timed();
    last = loss.item();
    if (step >= 2) times.push_back({between(begin, middle), between(middle, end), between(begin, done)});
  }
  const double step = median_of(times, &StepTimes::whole) * 1e-3;
  const auto tokens_per_step = static_cast<double>(options.batch * options.positions);
  const double flops = (6.0 * static_cast<double>(parameter_count(config)) +
                        12.0 * static_cast<double>(config.layers * config.width * options.positions)) *
                       tokens_per_step;
  const auto memory = context.memory_tracker().snapshot();
  const nlohmann::ordered_json json = {
      {"model", config.name},
      {"device", options.device},
      {"precision", options.precision},
      {"threads", context.threads().threads()},
      {"step_ms", step * 1e3},
      {"forward_ms", median_of(times, &StepTimes::forward)},
      {"backward_ms", median_of(times, &StepTimes::backward)},
      {"tokens_per_second", tokens_per_step / step},
      {"gflops", flops / step / 1e9},
      {"loss", last},
      {"peak_mb", static_cast<double>(memory.total_peak) / 1e6},
      {"activation_mb", static_cast<double>(memory.peak_of(MemoryCategory::activation)) / 1e6},
      {"reserved_mb", static_cast<double>(memory.reserved) / 1e6}};
  fmt::print("{}\n", json.dump());
}

}  // namespace

int main(int count, char** arguments) {
  CLI::App app("one rank, without the engine: what a training step costs");
  Options options;
  app.add_option("model", options.model)->capture_default_str();
  app.add_option("batch", options.batch)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("positions", options.positions)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("steps", options.steps)->check(CLI::Range(3, 1 << 20))->capture_default_str();
  app.add_option("threads", options.threads)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--device", options.device, "cpu or cuda")->capture_default_str();
  app.add_option("--precision", options.precision)->check(CLI::IsMember({"f32", "bf16"}))->capture_default_str();
  CLI11_PARSE(app, count, arguments);
  try {
    train(options);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_train_alone: {}\n", error.what());
    return 2;
  }
}
