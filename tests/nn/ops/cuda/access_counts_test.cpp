// The bytes that a KernelInterceptor receives equal those that the CUDA kernels read and write, emulated.
#include <gtest/gtest.h>

#include <map>

#include "tessera/nn/kernels/instrumented/instrumented_kernels.h"
#include "tests/nn/ops/cuda/emulation.h"
//
#include "tests/nn/ops/cuda/attention_run.h"
#include "tests/nn/ops/cuda/compare.h"

namespace tessera::nn::test {
namespace {

/// Bytes of one call, as reported and as accessed.
struct Counted {
  double reported_read = 0, reported_written = 0, read = 0, written = 0;
  double first_read = 0;  ///< without those that the call had read before; of watched arrays
};

class Counter final : public KernelInterceptor {
 public:
  void call(const KernelInvocation& call, Stream& /*stream*/, const std::function<void()>& run) override {
    emulation::Accesses& accesses = emulation::accesses();
    accesses.restart();
    run();
    last = {call.reads, call.writes, static_cast<double>(accesses.read), static_cast<double>(accesses.written),
            static_cast<double>(accesses.first_read)};
    calls[std::string(call.kernel)] = last;
  }
  bool splits_sums() const override { return false; }
  Counted last;
  std::map<std::string, Counted> calls;  ///< the last one of each kernel
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
  for (T* const array : at) emulation::accesses().add_range(array, kCount * sizeof(T));
  function(kernels, host.stream(), at);
  emulation::accesses().clear_ranges();
  return counter.last;
}

template <class T>
void expect_norms() {
  using W = OpMath<T>;
  Array<T> weight(numbers<T>("w", kWidth)), bias(numbers<T>("v", kWidth));
  Array<W> mean(numbers<W>("m", kRows)), rstd(numbers<W>("r", kRows));
  for (const bool adds : {false, true}) {
    expect_equal(counted_rows<T>([&](auto& k, Stream& s, auto at) {
                   k.template of<T>()->norm_forward(s, {.rows = kRows,
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
                   k.template of<T>()->norm_forward(s, {.rows = kRows,
                                                        .width = kWidth,
                                                        .x = at[0],
                                                        .weight = weight.data(),
                                                        .y = at[1],
                                                        .added = adds ? at[2] : nullptr,
                                                        .sum = adds ? at[3] : nullptr,
                                                        .norm = kernels::RowNorm::rms});
                 }),
                 "rms_norm_forward");
    expect_equal(counted_rows<T>([&](auto& k, Stream& s, auto at) {
                   k.template of<T>()->norm_backward(s, {.rows = kRows,
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
                   k.template of<T>()->norm_backward(s, {.rows = kRows,
                                                         .width = kWidth,
                                                         .x = at[0],
                                                         .weight = weight.data(),
                                                         .rstd = rstd.data(),
                                                         .dy = at[1],
                                                         .dx = at[2],
                                                         .accumulate_dx = adds,
                                                         .norm = kernels::RowNorm::rms});
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

/// The calls of a forward and backward of attention, by kernel, with accesses to its operands and results alone.
template <class T>
std::map<std::string, Counted> counted_attention(const AttentionCase& c) {
  Context host;
  Counter counter;
  InstrumentedDeviceKernels kernels(make_emulated_kernels({host.runtime(), host.memory(), host.threads()}), counter);
  AttentionRun run = AttentionRun::of<T>(c);
  run.on_array = [](const void* begin, std::size_t bytes) { emulation::accesses().add_range(begin, bytes); };
  run(*kernels.template of<T>(), host.stream());
  emulation::accesses().clear_ranges();
  return counter.calls;
}

/// Elements that kernels with blocks of `tile` positions read of two tensors of `heads` heads: for each block of
/// queries, the keys up to it. As many are read of queries for each block of keys, those from it on.
double read_by_tiles(const AttentionCase& c, std::size_t tile) {
  std::size_t positions = 0;
  for (std::size_t first = 0; first < c.positions; first += tile) positions += std::min(c.positions, first + tile);
  return static_cast<double>(2 * c.batch * c.heads * c.dim * positions);
}
double read_from_tiles(const AttentionCase& c, std::size_t tile) {
  std::size_t positions = 0;
  for (std::size_t first = 0; first < c.positions; first += tile) positions += c.positions - first;
  return static_cast<double>(2 * c.batch * c.heads * c.dim * positions);
}

template <class T>
void expect_attention(const AttentionCase& c) {
  const bool drops = c.dropout > 0;
  const auto calls = counted_attention<T>(c);
  const Counted forward = calls.at(drops ? "attention_dropout_forward" : "attention_forward"),
                backward = calls.at(drops ? "attention_dropout_backward" : "attention_backward");
  const std::string what = std::to_string(c.positions) + " positions, heads of " + std::to_string(c.dim) + " of " +
                           std::to_string(sizeof(T)) + " bytes";
  for (const Counted& call : {forward, backward}) {
    EXPECT_EQ(call.first_read, call.reported_read) << what;
    EXPECT_EQ(call.written, call.reported_written) << what;
  }
  const auto queries = static_cast<double>(c.queries()), keys = static_cast<double>(c.keys());
  const double before = c.accumulate ? queries + 2 * keys : 0;
  constexpr double kBytes = sizeof(T);
  if (sizeof(T) == 2) {
    EXPECT_EQ(forward.read, kBytes * (queries + read_by_tiles(c, 128))) << what;
    EXPECT_EQ(backward.read, kBytes * (2 * queries + 2 * keys + read_from_tiles(c, 128) + before)) << what;
  } else {
    EXPECT_EQ(forward.read, kBytes * (queries + read_by_tiles(c, 64))) << what;
    EXPECT_EQ(backward.read, kBytes * (4 * queries + 2 * keys + read_from_tiles(c, 64) + read_by_tiles(c, 64) + before))
        << what;
  }
}

// Kernels read each operand from memory once, as counted, and tiles of it again, from the cache: as often as the tiles
// of the kernel say.
TEST(AccessCounts, Attention) {
  for (const bool accumulate : {false, true}) {
    for (const std::size_t positions : {64, 320}) {
      const AttentionCase wide{1, positions, 2, 1, 128, 0, false, accumulate},
          narrow{1, positions, 2, 2, 64, 0.5, true};
      expect_attention<bf16>(wide);
      expect_attention<bf16>(narrow);
      expect_attention<float>(narrow);
    }
  }
  expect_attention<bf16>({1, 129, 2, 1, 24});
  expect_attention<float>({1, 66, 2, 1, 24, 0, false, true});
}

/// The control: what a call reads again is no first read.
TEST(AccessCounts, ReadsOfAnElementCountOnce) {
  const auto calls = counted_attention<bf16>({1, 256, 1, 1, 64});
  const Counted forward = calls.at("attention_forward");
  EXPECT_GT(forward.read, forward.first_read);
  EXPECT_EQ(forward.read - forward.first_read, 128 * 64 * 2 * sizeof(bf16));  // the first tile of keys and values
}

/// The control of counted_rows(): a weight in one of its arrays is counted, where the reports leave it out.
TEST(AccessCounts, ArraysOfRowsAreCounted) {
  const auto forward_with = [](float* weight, std::size_t array) {
    return counted_rows<float>([=](auto& k, Stream& s, auto at) {
      k.template of<float>()->norm_forward(s, {.rows = kRows,
                                               .width = kWidth,
                                               .x = at[0],
                                               .weight = weight != nullptr ? weight : at[array],
                                               .y = at[1],
                                               .norm = kernels::RowNorm::rms});
    });
  };
  Array<float> weight(numbers<float>("w", kWidth));
  expect_equal(forward_with(weight.data(), 0), "outside of the arrays");
  const Counted inside = forward_with(nullptr, 2);
  EXPECT_GT(inside.read, inside.reported_read);
  EXPECT_EQ(inside.written, inside.reported_written);
}

/// The control: a call that reads an array which its arguments do not name.
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
