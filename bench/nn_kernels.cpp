// The kernels at gpt-mini's shapes (batch 8 x 256 positions, width 384, 6 heads of 64, vocabulary 256, f32, one
// thread), and the machine's own sgemm and memcpy in the same run.
//
// "flops" is floating-point operations per second (matrix products; attention counts only the half below the diagonal),
// "bytes" is bytes read and written per second, each tensor once.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "tessera/nn/kernels/activation.h"
#include "tessera/nn/kernels/attention.h"
#include "tessera/nn/kernels/cross_entropy.h"
#include "tessera/nn/kernels/dropout.h"
#include "tessera/nn/kernels/elementwise.h"
#include "tessera/nn/kernels/embedding.h"
#include "tessera/nn/kernels/gemm.h"
#include "tessera/nn/kernels/norm.h"
#include "tessera/nn/kernels/optimizer.h"
#include "tessera/nn/random.h"

namespace {
using namespace tessera::nn;
using namespace tessera::nn::kernels;
using benchmark::Counter;
using benchmark::State;

constexpr std::size_t kBatch = 8, kPositions = 256, kHeads = 6, kDim = 64, kWidth = kHeads * kDim, kVocabulary = 256;
constexpr std::size_t kRows = kBatch * kPositions;
constexpr std::size_t kParameters = 10844160;

std::vector<float> numbers(std::size_t count) {
  std::vector<float> x(count);
  fill_normal({.name = "bench", .end = count}, 0.0f, 1.0f, x.data());
  return x;
}

void rate(State& state, const char* name, double each) {
  state.counters[name] = Counter(each, Counter::kIsIterationInvariantRate, Counter::kIs1000);
}

void memcpy_64m(State& state) {
  std::vector<char> from(64 << 20, 1), to(64 << 20);
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), to.size());
    benchmark::ClobberMemory();
  }
  rate(state, "bytes", 2.0 * static_cast<double>(to.size()));
}
BENCHMARK(memcpy_64m)->Unit(benchmark::kMillisecond);

void product(State& state, Transpose ta, Transpose tb, std::size_t m, std::size_t n, std::size_t k) {
  ThreadPool pool;
  const auto a = numbers(m * k), b = numbers(k * n);
  std::vector<float> c(m * n);
  for (auto _ : state)
    gemm<float>(pool,
                {.trans_a = ta, .trans_b = tb, .m = m, .n = n, .k = k, .a = a.data(), .b = b.data(), .c = c.data()});
  rate(state, "flops", 2.0 * static_cast<double>(m * n * k));
}
constexpr auto kNo = Transpose::no, kYes = Transpose::yes;
#define PRODUCT(name, ...) BENCHMARK_CAPTURE(product, name, __VA_ARGS__)->Unit(benchmark::kMillisecond)
PRODUCT(sgemm_1024, kNo, kNo, 1024, 1024, 1024);
PRODUCT(qkv_forward, kNo, kNo, kRows, 3 * kWidth, kWidth);
PRODUCT(qkv_dx, kNo, kYes, kRows, kWidth, 3 * kWidth);
PRODUCT(qkv_dw, kYes, kNo, kWidth, 3 * kWidth, kRows);
PRODUCT(projection_forward, kNo, kNo, kRows, kWidth, kWidth);
PRODUCT(projection_dx, kNo, kYes, kRows, kWidth, kWidth);
PRODUCT(projection_dw, kYes, kNo, kWidth, kWidth, kRows);
PRODUCT(up_forward, kNo, kNo, kRows, 4 * kWidth, kWidth);
PRODUCT(up_dx, kNo, kYes, kRows, kWidth, 4 * kWidth);
PRODUCT(up_dw, kYes, kNo, kWidth, 4 * kWidth, kRows);
PRODUCT(down_forward, kNo, kNo, kRows, kWidth, 4 * kWidth);
PRODUCT(down_dx, kNo, kYes, kRows, 4 * kWidth, kWidth);
PRODUCT(down_dw, kYes, kNo, 4 * kWidth, kWidth, kRows);
PRODUCT(head_forward, kNo, kYes, kRows, kVocabulary, kWidth);
PRODUCT(head_dx, kNo, kNo, kRows, kWidth, kVocabulary);
PRODUCT(head_dw, kYes, kNo, kVocabulary, kWidth, kRows);

struct AttentionBench {
  AttentionShape shape{kBatch, kPositions, kHeads, kHeads, kDim};
  std::vector<float> qkv = numbers(3 * kRows * kWidth), dout = numbers(kRows * kWidth);
  std::vector<float> out = dout, dqkv = qkv, lse = std::vector<float>(kBatch * kHeads * kPositions);
  std::unique_ptr<void, decltype(&std::free)> scratch{std::aligned_alloc(64, 4 << 20), &std::free};
  ThreadPool pool;
  HeadsView<const float> in(std::size_t part) {
    return fused_qkv_view(static_cast<const float*>(qkv.data()), part, kPositions, kHeads, kDim);
  }
  HeadsView<float> gradient(std::size_t part) { return fused_qkv_view(dqkv.data(), part, kPositions, kHeads, kDim); }
  template <class T>
  static HeadsView<T> rows(std::vector<float>& x) {
    return heads_view(static_cast<T*>(x.data()), kPositions, kHeads, kDim);
  }
  void forward() {
    attention_forward<float>(pool, {shape, in(0), in(1), in(2), rows<float>(out), lse.data(), scratch.get()});
  }
  void backward() {
    attention_backward<float>(pool, {.shape = shape,
                                     .q = in(0),
                                     .k = in(1),
                                     .v = in(2),
                                     .out = rows<const float>(out),
                                     .dout = rows<const float>(dout),
                                     .log_sum_exp = lse.data(),
                                     .dq = gradient(0),
                                     .dk = gradient(1),
                                     .dv = gradient(2),
                                     .scratch = scratch.get()});
  }
  // Multiply-adds of one product over the triangle below the diagonal.
  static constexpr double kProduct = 1.0 * kBatch * kHeads * kPositions * (kPositions + 1) * kDim;
};
void attention_forward_causal(State& state) {
  AttentionBench bench;
  for (auto _ : state) bench.forward();
  rate(state, "flops", 2 * AttentionBench::kProduct);
}
BENCHMARK(attention_forward_causal)->Unit(benchmark::kMillisecond);
void attention_backward_causal(State& state) {
  AttentionBench bench;
  bench.forward();
  for (auto _ : state) bench.backward();
  rate(state, "flops", 5 * AttentionBench::kProduct);
}
BENCHMARK(attention_backward_causal)->Unit(benchmark::kMillisecond);

void activation(State& state, Activation kind, bool backward) {
  ThreadPool pool;
  const std::size_t n = kRows * 4 * kWidth;
  const auto x = numbers(n), dy = x;
  std::vector<float> y(n);
  for (auto _ : state) {
    if (backward)
      activation_backward<float>(pool, kind, {x.data(), dy.data(), y.data(), n, false});
    else
      activation_forward(pool, kind, x.data(), y.data(), n);
  }
  rate(state, "bytes", (backward ? 12.0 : 8.0) * static_cast<double>(n));
}
BENCHMARK_CAPTURE(activation, gelu_tanh_forward, Activation::gelu_tanh, false)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(activation, gelu_tanh_backward, Activation::gelu_tanh, true)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(activation, gelu_erf_forward, Activation::gelu_erf, false)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(activation, relu_forward, Activation::relu, false)->Unit(benchmark::kMillisecond);

void layer_norm(State& state, bool backward) {
  ThreadPool pool;
  const auto x = numbers(kRows * kWidth), dy = x, weight = numbers(kWidth), bias = weight;
  std::vector<float> y(x.size()), mean(kRows), rstd(kRows), dw(kWidth), db(kWidth);
  const NormForward<float> forward{.rows = kRows,
                                   .width = kWidth,
                                   .x = x.data(),
                                   .weight = weight.data(),
                                   .bias = bias.data(),
                                   .y = y.data(),
                                   .mean = mean.data(),
                                   .rstd = rstd.data()};
  norm_forward(pool, forward);
  for (auto _ : state) {
    if (backward)
      norm_backward<float>(pool, {.rows = kRows,
                                  .width = kWidth,
                                  .x = x.data(),
                                  .weight = weight.data(),
                                  .mean = mean.data(),
                                  .rstd = rstd.data(),
                                  .dy = dy.data(),
                                  .dx = y.data(),
                                  .dweight = dw.data(),
                                  .dbias = db.data()});
    else
      norm_forward(pool, forward);
  }
  rate(state, "bytes", (backward ? 12.0 : 8.0) * static_cast<double>(x.size()));
}
BENCHMARK_CAPTURE(layer_norm, forward, false)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(layer_norm, backward, true)->Unit(benchmark::kMillisecond);

void cross_entropy(State& state) {
  ThreadPool pool;
  const auto logits = numbers(kRows * kVocabulary);
  std::vector<float> d(logits.size()), max(kRows), sum(kRows);
  const std::vector<std::int32_t> targets(kRows, 7);
  for (auto _ : state) {
    cross_entropy_forward<float>(pool, {.logits = logits.data(),
                                        .targets = targets.data(),
                                        .rows = kRows,
                                        .vocabulary = kVocabulary,
                                        .row_max = max.data(),
                                        .row_sum = sum.data()});
    cross_entropy_backward<float>(pool, {.logits = logits.data(),
                                         .targets = targets.data(),
                                         .rows = kRows,
                                         .vocabulary = kVocabulary,
                                         .row_max = max.data(),
                                         .row_sum = sum.data(),
                                         .scale = 1.0f / kRows,
                                         .dlogits = d.data()});
  }
  rate(state, "bytes", 12.0 * static_cast<double>(logits.size()));
}
BENCHMARK(cross_entropy)->Unit(benchmark::kMillisecond);

void residual_add(State& state) {
  ThreadPool pool;
  const auto a = numbers(kRows * kWidth), b = a;
  std::vector<float> y(a.size());
  for (auto _ : state) add(pool, a.data(), b.data(), y.data(), y.size());
  rate(state, "bytes", 12.0 * static_cast<double>(y.size()));
}
BENCHMARK(residual_add)->Unit(benchmark::kMillisecond);

void bias_gradient(State& state) {
  ThreadPool pool;
  const auto x = numbers(kRows * 4 * kWidth);
  std::vector<float> out(4 * kWidth);
  for (auto _ : state) column_sums<float>(pool, {x.data(), out.data(), kRows, 4 * kWidth, false});
  rate(state, "bytes", 4.0 * static_cast<double>(x.size()));
}
BENCHMARK(bias_gradient)->Unit(benchmark::kMillisecond);

void dropout_width(State& state) {
  ThreadPool pool;
  const auto x = numbers(kRows * kWidth);
  std::vector<float> y(x.size());
  for (auto _ : state)
    dropout<float>(pool, {.stream = dropout_stream(0, 0, "bench", 0),
                          .probability = 0.1,
                          .samples = kBatch,
                          .elements = kPositions * kWidth,
                          .x = x.data(),
                          .y = y.data()});
  rate(state, "bytes", 8.0 * static_cast<double>(x.size()));
}
BENCHMARK(dropout_width)->Unit(benchmark::kMillisecond);

void embedding(State& state) {
  ThreadPool pool;
  const auto weight = numbers(kVocabulary * kWidth), dy = numbers(kRows * kWidth);
  std::vector<float> y(dy.size()), dw(weight.size());
  std::vector<std::int32_t> ids(kRows);
  for (std::size_t i = 0; i < kRows; ++i) ids[i] = static_cast<std::int32_t>(i * 37 % kVocabulary);
  for (auto _ : state) {
    embedding_forward<float>(pool, {weight.data(), ids.data(), y.data(), kRows, kVocabulary, kWidth, false});
    embedding_backward<float>(pool, {ids.data(), dy.data(), dw.data(), kRows, kVocabulary, kWidth, false});
  }
  rate(state, "bytes", 20.0 * static_cast<double>(y.size()));
}
BENCHMARK(embedding)->Unit(benchmark::kMillisecond);

void adamw(State& state) {
  ThreadPool pool;
  auto p = numbers(kParameters);
  const auto g = p;
  std::vector<float> m(kParameters), v(kParameters);
  for (auto _ : state)
    adam_step<float>(pool, {.parameter = p.data(),
                            .gradient = g.data(),
                            .first_moment = m.data(),
                            .second_moment = v.data(),
                            .count = kParameters,
                            .weight_decay = 0.01});
  rate(state, "bytes", 28.0 * kParameters);
}
BENCHMARK(adamw)->Unit(benchmark::kMillisecond);

void gradient_norm(State& state) {
  ThreadPool pool;
  const auto g = numbers(kParameters);
  for (auto _ : state) benchmark::DoNotOptimize(norm_part(pool, Norm::two, g.data(), kParameters));
  rate(state, "bytes", 4.0 * kParameters);
}
BENCHMARK(gradient_norm)->Unit(benchmark::kMillisecond);

void initialise(State& state) {
  std::vector<float> x(kParameters);
  for (auto _ : state) fill_normal({.name = "bench", .end = kParameters}, 0.0f, 0.02f, x.data());
  rate(state, "bytes", 4.0 * kParameters);
}
BENCHMARK(initialise)->Unit(benchmark::kMillisecond);

}  // namespace
