// Trains a preset alone on random tokens and prints what one step costs: the pair of PyTorch's side of
// docs/performance.md.
//   bench_train_alone [model] [batch] [positions] [steps] [threads]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "tessera/nn/models/causal_model.h"
#include "tessera/nn/optimizer.h"

using namespace tessera::nn;

namespace {

Tensor random_tokens(Context& context, std::int64_t batch, std::int64_t positions, std::int64_t vocabulary) {
  Tensor tokens = Tensor::empty(context, {batch, positions}, DType::i32);
  std::mt19937 random(1);
  for (std::int64_t i = 0; i < tokens.count(); ++i)
    tokens.data<std::int32_t>()[i] = static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(vocabulary));
  return tokens;
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

int main(int count, char** arguments) {
  const auto argument = [&](int index, const char* otherwise) { return index < count ? arguments[index] : otherwise; };
  const ModelConfig config = preset(argument(1, "gpt-mini"));
  const std::int64_t batch = std::atoll(argument(2, "8"));
  const std::int64_t positions = std::atoll(argument(3, "256"));
  const int steps = std::max(std::atoi(argument(4, "12")), 3);
  Context context({.threads = std::atoi(argument(5, "1"))});
  const auto model = make_model(context, config);
  model->materialize(0);
  Optimizer optimizer(*model, {});
  const Tensor tokens = random_tokens(context, batch, positions, config.vocabulary);
  std::vector<double> times;
  double last = 0, in_forward = 0, in_backward = 0;
  for (int step = 0; step < steps; ++step) {
    const double start = now();
    Tape tape;
    const TapeScope scope(context, &tape);
    const Tensor loss = model->loss(tokens, tokens);
    const double middle = now();
    tape.backward(loss);
    const double end = now();
    optimizer.step(1e-3);
    times.push_back(now() - start);
    in_forward = middle - start;
    in_backward = end - middle;
    last = loss.item();
  }
  std::sort(times.begin() + 2, times.end());
  const double step = times[2 + (times.size() - 2) / 2];
  const auto tokens_per_step = static_cast<double>(batch * positions);
  const double flops = (6.0 * static_cast<double>(parameter_count(config)) +
                        12.0 * static_cast<double>(config.layers * config.width * positions)) *
                       tokens_per_step;
  const auto memory = context.ledger().snapshot();
  std::printf(
      "{\"model\": \"%s\", \"threads\": %zu, \"step_ms\": %.1f, \"forward_ms\": %.1f, \"backward_ms\": %.1f, "
      "\"tokens_per_second\": "
      "%.0f, \"gflops\": %.1f, \"loss\": %.4f, \"peak_mb\": %.1f, \"activation_mb\": %.1f, \"reserved_mb\": %.1f}\n",
      config.name.c_str(), context.threads().threads(), step * 1e3, in_forward * 1e3, in_backward * 1e3,
      tokens_per_step / step, flops / step / 1e9, last, static_cast<double>(memory.total_peak) / 1e6,
      static_cast<double>(memory.peak_of(MemoryUse::activation)) / 1e6, static_cast<double>(memory.reserved) / 1e6);
}
