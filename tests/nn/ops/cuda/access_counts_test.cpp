// The bytes that a KernelInterceptor receives equal those that the CUDA kernels read and write, emulated.
#include <gtest/gtest.h>

#include "tessera/nn/kernels/instrumented/instrumented_kernels.h"
#include "tests/nn/ops/cuda/emulation.h"
//
#include "tests/nn/ops/cuda/compare.h"

namespace tessera::nn::test {
namespace {

/// Bytes of one call, as reported and as accessed.
struct Counted {
  double reported_read = 0, reported_written = 0, read = 0, written = 0;
};

class Counter final : public KernelInterceptor {
 public:
  void call(const KernelInvocation& call, Stream& /*stream*/, const std::function<void()>& run) override {
    const emulation::Accesses before = emulation::accesses();
    run();
    const emulation::Accesses& after = emulation::accesses();
    last = {call.reads, call.writes, static_cast<double>(after.read - before.read),
            static_cast<double>(after.written - before.written)};
  }
  bool splits_sums() const override { return false; }
  Counted last;
};

constexpr std::size_t kRows = 8, kWidth = 64, kCount = kRows * kWidth;

/// Calls function(kernels, stream), with arrays of kCount elements of T; returns the bytes of its last call.
template <class T, class Function>
Counted counted(const Function& function) {
  Context host;
  Counter counter;
  InstrumentedDeviceKernels kernels(make_emulated_kernels({host.runtime(), host.memory(), host.threads()}), counter);
  Array<T> a(numbers<T>("a", kCount)), b(numbers<T>("b", kCount)), c(numbers<T>("c", kCount)),
      d(numbers<T>("d", kCount));
  function(kernels, host.stream(), std::array{a.data(), b.data(), c.data(), d.data()});
  return counter.last;
}
void expect_equal(const Counted& c, const char* what) {
  EXPECT_EQ(c.read, c.reported_read) << what;
  EXPECT_EQ(c.written, c.reported_written) << what;
  EXPECT_GT(c.read + c.written, 0) << what;
}

template <class T>
void expect_element_wise() {
  expect_equal(counted<T>([](auto& k, Stream& s, auto at) {
                 k.template of<T>()->add(s, {at[0], at[1], at[2], kCount});
               }),
               "add");
  for (const bool accumulate : {false, true}) {
    expect_equal(counted<T>([=](auto& k, Stream& s, auto at) {
                   k.template of<T>()->assign(s, {at[0], at[1], kCount, accumulate});
                 }),
                 "assign");
    expect_equal(counted<T>([=](auto& k, Stream& s, auto at) {
                   k.template of<T>()->activation_backward(s, kernels::Activation::gelu_tanh,
                                                           {at[0], at[1], at[2], kCount, accumulate});
                 }),
                 "activation_backward");
  }
  expect_equal(counted<T>([](auto& k, Stream& s, auto at) {
                 std::array<double, 4> out;
                 k.template of<T>()->norm_parts(s, {.x = at[0], .count = kCount / 4, .slices = 4, .out = out.data()});
               }),
               "norm_parts");
}

TEST(AccessCounts, ElementWise) {
  expect_element_wise<float>();
  expect_element_wise<bf16>();
}

TEST(AccessCounts, Optimizers) {
  for (const bool half : {false, true}) {
    Array<bf16> gradient(numbers<bf16>("g", kCount)), copy(numbers<bf16>("c", kCount));
    const kernels::HalfStep step =
        half ? kernels::HalfStep{DType::bf16, gradient.data(), copy.data()} : kernels::HalfStep{};
    expect_equal(counted<float>([&](auto& k, Stream& s, auto at) {
                   k.f32_kernels()->adam_step(s, {.parameter = at[0],
                                                  .gradient = half ? nullptr : at[1],
                                                  .first_moment = at[2],
                                                  .second_moment = at[3],
                                                  .count = kCount,
                                                  .half = step});
                 }),
                 half ? "adam_step of bf16" : "adam_step");
    expect_equal(counted<float>([&](auto& k, Stream& s, auto at) {
                   k.f32_kernels()->sgd_step(s, {.parameter = at[0],
                                                 .gradient = half ? nullptr : at[1],
                                                 .momentum_buffer = at[2],
                                                 .count = kCount,
                                                 .momentum = 0.9,
                                                 .half = step});
                 }),
                 half ? "sgd_step of bf16" : "sgd_step");
  }
}

/// Like counted(), of six arrays of kCount elements; other arrays, such as weights as short as a row and scratch, are
/// not counted.
template <class T, class Function>
Counted counted_rows(const Function& function) {
  Context host;
  Counter counter;
  InstrumentedDeviceKernels kernels(make_emulated_kernels({host.runtime(), host.memory(), host.threads()}), counter);
  Array<T> a(numbers<T>("a", kCount)), b(numbers<T>("b", kCount)), c(numbers<T>("c", kCount)),
      d(numbers<T>("d", kCount)), e(numbers<T>("e", kCount)), f(numbers<T>("f", kCount));
  const std::array<T*, 6> at{a.data(), b.data(), c.data(), d.data(), e.data(), f.data()};
  for (T* const array : at) emulation::accesses().ranges.push_back({array, kCount * sizeof(T)});
  function(kernels, host.stream(), at);
  emulation::accesses().ranges.clear();
  return counter.last;
}

template <class T>
void expect_norms() {
  using W = OpMath<T>;
  Array<T> weight(numbers<T>("w", kWidth)), bias(numbers<T>("v", kWidth));
  Array<W> mean(numbers<W>("m", kRows)), rstd(numbers<W>("r", kRows));
  for (const bool adds : {false, true}) {
    expect_equal(counted_rows<T>([&](auto& k, Stream& s, auto at) {
                   k.template of<T>()->layer_norm_forward(s, {.rows = kRows,
                                                              .width = kWidth,
                                                              .x = at[0],
                                                              .weight = weight.data(),
                                                              .bias = bias.data(),
                                                              .y = at[1],
                                                              .added = adds ? at[2] : nullptr,
                                                              .sum = adds ? at[3] : nullptr});
                 }),
                 "layer_norm_forward");
    expect_equal(counted_rows<T>([&](auto& k, Stream& s, auto at) {
                   k.template of<T>()->rms_norm_forward(s, {.rows = kRows,
                                                            .width = kWidth,
                                                            .x = at[0],
                                                            .weight = weight.data(),
                                                            .y = at[1],
                                                            .added = adds ? at[2] : nullptr,
                                                            .sum = adds ? at[3] : nullptr});
                 }),
                 "rms_norm_forward");
    expect_equal(counted_rows<T>([&](auto& k, Stream& s, auto at) {
                   k.template of<T>()->layer_norm_backward(s, {.rows = kRows,
                                                               .width = kWidth,
                                                               .x = at[0],
                                                               .weight = weight.data(),
                                                               .mean = mean.data(),
                                                               .rstd = rstd.data(),
                                                               .dy = at[1],
                                                               .dx = at[2],
                                                               .dweight = weight.data(),
                                                               .dbias = bias.data(),
                                                               .accumulate_dx = adds});
                 }),
                 "layer_norm_backward");
    expect_equal(counted_rows<T>([&](auto& k, Stream& s, auto at) {
                   k.template of<T>()->rms_norm_backward(s, {.rows = kRows,
                                                             .width = kWidth,
                                                             .x = at[0],
                                                             .weight = weight.data(),
                                                             .rstd = rstd.data(),
                                                             .dy = at[1],
                                                             .dx = at[2],
                                                             .accumulate_dx = adds});
                 }),
                 "rms_norm_backward");
  }
}

TEST(AccessCounts, Norms) {
  expect_norms<float>();
  expect_norms<bf16>();
}

template <class T>
void expect_tables() {
  using W = OpMath<T>;
  const std::array<std::int32_t, kRows> ids{3, 0, 7, 1, 6, 2, 5, 4};  // each once, as the counts assume
  Array<W> max(numbers<W>("m", kRows)), sum(numbers<W>("s", kRows));
  std::array<double, 3> numbers_of_loss{1, 1, 1};
  expect_equal(counted_rows<T>([&](auto& k, Stream& s, auto at) {
                 k.template of<T>()->cross_entropy_forward(
                     s, {.rows = {.logits = at[0], .targets = ids.data(), .rows = kRows, .vocabulary = kWidth},
                         .loss = &numbers_of_loss[0],
                         .valid = &numbers_of_loss[1]});
               }),
               "cross_entropy_forward");
  for (const bool accumulate : {false, true}) {
    expect_equal(counted_rows<T>([&](auto& k, Stream& s, auto at) {
                   k.template of<T>()->cross_entropy_backward(s, {.rows = {.logits = at[0],
                                                                           .targets = ids.data(),
                                                                           .rows = kRows,
                                                                           .vocabulary = kWidth,
                                                                           .row_max = max.data(),
                                                                           .row_sum = sum.data(),
                                                                           .dlogits = at[1],
                                                                           .accumulate = accumulate},
                                                                  .upstream = &numbers_of_loss[2],
                                                                  .valid = &numbers_of_loss[1]});
                 }),
                 "cross_entropy_backward");
    expect_equal(
        counted_rows<T>([&](auto& k, Stream& s, auto at) {
          k.template of<T>()->embedding_forward(s, {at[0], ids.data(), at[1], kRows, kRows, kWidth, accumulate});
        }),
        "embedding_forward");
    expect_equal(
        counted_rows<T>([&](auto& k, Stream& s, auto at) {
          k.template of<T>()->embedding_backward(s, {ids.data(), at[0], at[1], kRows, kRows, kWidth, accumulate});
        }),
        "embedding_backward");
  }
}

TEST(AccessCounts, LossAndEmbedding) {
  expect_tables<float>();
  expect_tables<bf16>();
}

/// The control: a call that reads an array which its arguments do not name.
/// The control of counted_rows(): a weight in one of its arrays is counted, where the reports leave it out.
TEST(AccessCounts, ArraysOfRowsAreCounted) {
  const auto forward_with = [](float* weight, std::size_t array) {
    return counted_rows<float>([=](auto& k, Stream& s, auto at) {
      k.template of<float>()->rms_norm_forward(
          s,
          {.rows = kRows, .width = kWidth, .x = at[0], .weight = weight != nullptr ? weight : at[array], .y = at[1]});
    });
  };
  Array<float> weight(numbers<float>("w", kWidth));
  expect_equal(forward_with(weight.data(), 0), "outside of the arrays");
  const Counted inside = forward_with(nullptr, 2);
  EXPECT_GT(inside.read, inside.reported_read);
  EXPECT_EQ(inside.written, inside.reported_written);
}

TEST(AccessCounts, DetectsUncountedRead) {
  const Counted right = counted<float>([](auto& k, Stream& s, auto at) {
    k.f32_kernels()->add(s, {at[0], at[1], at[2], kCount});
  });
  Counter counter;
  Context host;
  const auto kernels = make_emulated_kernels({host.runtime(), host.memory(), host.threads()});
  Array<float> x(numbers<float>("x", kCount));
  counter.call({.kernel = "add", .reads = right.reported_read, .writes = right.reported_written}, host.stream(), [&] {
    kernels->f32_kernels()->add(host.stream(), {x.data(), x.data(), x.data(), kCount});
    kernels->f32_kernels()->assign(host.stream(), {x.data(), x.data(), kCount});
  });
  EXPECT_EQ(counter.last.read, right.reported_read + kCount * sizeof(float));
}

}  // namespace
}  // namespace tessera::nn::test
