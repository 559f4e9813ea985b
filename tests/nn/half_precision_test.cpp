// Half-precision tensors on the host: each kernel gives the f32 kernel's result, rounded once; models train on them.
#include <cmath>

#include "tessera/nn/host_access.h"
#include "tessera/nn/models/causal_model.h"
#include "tessera/nn/ops/linear.h"
#include "tessera/nn/optimizer.h"
#include "tests/nn/device_training.h"
#include "tests/nn/ops/cuda/compare.h"

namespace tessera::nn::test {

void set_thread_order(int) {}  // the host has no thread order

namespace {

template <class T>
class HalfKernels : public testing::Test {};
using HalfTypes = testing::Types<f16, bf16>;
TYPED_TEST_SUITE(HalfKernels, HalfTypes);

template <class T, class Operation>
void expect_rounded_f32(const Operation& operation) {
  Context context({.threads = 2});
  std::vector<double> expected = operation(*context.device_kernels().f32_kernels(), context.stream());
  for (double& value : expected) value = as_double(rounded<T>(value));
  const std::vector<double> got = operation(*context.device_kernels().of<T>(), context.stream());
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], expected[i]) << "output " << i;
}

/// Longer than the chunks that are converted at once, and a multiple of none.
constexpr std::size_t kLong = (std::size_t{1} << 19U) + 13;

TYPED_TEST(HalfKernels, ElementsEqualRoundedF32) {
  using T = TypeParam;
  const auto x = numbers<T>("x", kLong), y = numbers<T>("y", kLong);
  expect_rounded_f32<T>([&]<class U>(KernelTable<U>& k, Stream& s) {
    Array<U> a(x), b(y), kept(y), scaled(y), dx(y);
    Array<U> sum = Array<U>::poisoned(kLong), active = Array<U>::poisoned(kLong), drawn = Array<U>::poisoned(kLong);
    k.assign(s, {a.data(), kept.data(), kLong, true});
    k.add(s, {a.data(), b.data(), sum.data(), kLong});
    k.scale(s, {a.data(), 0.3F, scaled.data(), kLong, true});
    k.activation_forward(s, {kernels::Activation::gelu_tanh, a.data(), active.data(), kLong});
    k.activation_backward(s, kernels::Activation::silu, {a.data(), b.data(), dx.data(), kLong, true});
    k.fill_normal(s, {{tensor_stream(4, "w"), 17, 17 + kLong}, 0.5F, 0.25F, drawn.data()});
    return kept.values() + sum.values() + scaled.values() + active.values() + dx.values() + drawn.values();
  });
}

TYPED_TEST(HalfKernels, DropoutOfManySamplesEqualsOneCall) {
  using T = TypeParam;
  const std::size_t samples = 5, elements = 100'003;
  const auto x = numbers<T>("x", samples * elements);
  expect_rounded_f32<T>([&]<class U>(KernelTable<U>& k, Stream& s) {
    Array<U> in(x);
    Array<U> out = Array<U>::poisoned(x.size());
    k.dropout(s, {dropout_stream(3, 9, "h.0", 5), 0.3, samples, elements, in.data(), out.data(), false});
    return out.values();
  });
}

TYPED_TEST(HalfKernels, ChunkedLinearEqualsRoundedF32WithinOneUnit) {
  using T = TypeParam;
  const std::size_t rows = 1500, in = 33, out = 515;
  const auto x = numbers<T>("x", rows * in), w = numbers<T>("w", in * out, 0.2), b = numbers<T>("b", out),
             dy = numbers<T>("dy", rows * out, 0.05);
  const auto run = [&]<class U>(KernelTable<U>& k, Stream& s) {
    Array<U> a(x), weight(w), bias(b), from(dy), dx(x), db(b);
    Array<U> y = Array<U>::poisoned(dy.size()), dw = Array<U>::poisoned(w.size());
    const kernels::LinearShape shape{rows, in, out, kernels::WeightLayout::out_in};
    k.linear_forward(s, {shape, a.data(), weight.data(), bias.data(), y.data()});
    k.linear_backward(
        s, {shape, a.data(), weight.data(), from.data(), dx.data(), dw.data(), db.data(), true, false, true});
    return y.values() + dx.values() + dw.values() + db.values();
  };
  Context context;
  const auto expected = run(*context.device_kernels().f32_kernels(), context.stream());
  const auto got = run(*context.device_kernels().of<T>(), context.stream());
  for (std::size_t i = 0; i < got.size(); ++i)
    ASSERT_NEAR(got[i], expected[i], 1.01 * unit<T>() * std::max(1.0, std::abs(expected[i]))) << i;
}

/// Squares of half-precision numbers are exact in f64, so the sum has the same value in any order, up to f64 rounding.
TYPED_TEST(HalfKernels, SumOfSquaresIsInF64) {
  using T = TypeParam;
  const auto x = numbers<T>("x", kLong);
  double expected = 0;
  for (const double v : x) expected += v * v;
  Context context;
  Array<T> in(x);
  Array<double> out({NAN});
  context.kernels<T>("norm").norm_parts(context.stream(), {.x = in.data(), .count = kLong, .out = out.data()});
  EXPECT_NEAR(out.values()[0], expected, 1e-10 * expected);
}

TEST(HalfMemory, ScratchIsTrackedAndBounded) {
  Context context;
  const Tensor x = Tensor::zeros(context, {1 << 22}, DType::bf16), y = Tensor::zeros(context, {1 << 22}, DType::bf16);
  context.kernels<bf16>("add").add(context.stream(), {x.data<bf16>(), y.data<bf16>(), y.data<bf16>(), 1 << 22});
  const std::uint64_t peak = context.memory_tracker().snapshot().peak_of(MemoryCategory::activation);
  EXPECT_EQ(peak, 2U * (2U << 22U) + 2U * (1U << 20U));
}

TEST(HalfMemory, OptimizersKeepF32) {
  Context context;
  EXPECT_THROW(context.kernels<bf16>("adam").adam_step(context.stream(), {}), Unsupported);
}

// --- models

struct Pass {
  double loss = 0;
  std::vector<double> gradients;
};

/// Loss and all gradients of a model with half-precision weights, computed in `dtype`.
Pass pass_of(const char* name, DType dtype, const ContextOptions& options = {}) {
  Context context(options);
  const auto model = make_model(context, preset(name));
  model->set_dtype(dtype);
  model->materialize(0);
  const Tensor tokens = counting_ids(context, 0), targets = counting_ids(context, 1);
  Tape tape;
  const TapeScope scope(context, &tape);
  const Tensor loss = model->loss(tokens, targets);
  tape.backward(loss);
  Pass pass{loss.item(), {}};
  context.stream().synchronize();
  for (const auto& parameter : model->parameters()) {
    const Tensor gradient = parameter->gradient().value();
    EXPECT_EQ(gradient.dtype(), dtype);
    for (std::int64_t i = 0; i < gradient.count(); ++i)
      pass.gradients.push_back(dtype == DType::bf16  ? as_double(gradient.data<bf16>()[i])
                               : dtype == DType::f16 ? as_double(gradient.data<f16>()[i])
                                                     : as_double(gradient.data<float>()[i]));
  }
  return pass;
}

class HalfModels : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Models, HalfModels, testing::Values("gpt-nano", "llama-nano"),
                         [](const auto& given) { return std::string(given.param).substr(0, 3); });

/// Relative distance of norms: |a - b| / |b|.
double distance(const Pass& a, const Pass& b) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < b.gradients.size(); ++i) {
    difference += (a.gradients[i] - b.gradients[i]) * (a.gradients[i] - b.gradients[i]);
    size += b.gradients[i] * b.gradients[i];
  }
  return std::sqrt(difference / size);
}

TEST_P(HalfModels, LossAndGradientsAreCloseToF32) {
  const Pass f32 = pass_of(GetParam(), DType::f32);
  for (const auto& [dtype, bound] : {std::pair(DType::bf16, 0.03), std::pair(DType::f16, 0.004)}) {
    const Pass half = pass_of(GetParam(), dtype);
    EXPECT_NEAR(half.loss, f32.loss, 0.2 * bound * f32.loss);
    EXPECT_LT(distance(half, f32), bound);
    EXPECT_GT(distance(half, f32), 1e-5);  // it computes in half precision
  }
}

TEST_P(HalfModels, LazyStreamIsBitwiseEqual) {
  ContextOptions lazy{.make_stream = make_lazy_stream};
  lazy.memory = {.pooled_from = 1, .poison = true};
  const Pass late = pass_of(GetParam(), DType::bf16, lazy), now = pass_of(GetParam(), DType::bf16);
  EXPECT_EQ(late.loss, now.loss);
  EXPECT_EQ(late.gradients, now.gradients);
}

TEST_P(HalfModels, MetaRunNeedsSameMemory) {
  const auto peaks = [&](Context& context) {
    const auto model = make_model(context, preset(GetParam()));
    model->set_dtype(DType::bf16);
    model->materialize(0);
    const Tensor tokens = counting_ids(context, 0), targets = counting_ids(context, 1);
    Tape tape;
    const TapeScope scope(context, &tape);
    tape.backward(model->loss(tokens, targets));
    return context.memory_tracker().snapshot().peak;
  };
  Context host, meta({.device = {DeviceType::meta, 0}});
  EXPECT_EQ(peaks(meta), peaks(host));
}

/// Training without an engine, with the master weights of the optimizer.
std::vector<double> losses_of(DType dtype, double rate, int steps) {
  Context context;
  const auto model = make_model(context, preset("gpt-nano"));
  model->set_dtype(dtype);
  model->materialize(0);
  Optimizer optimizer(*model, {});
  const Tensor tokens = counting_ids(context, 0), targets = counting_ids(context, 1);
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    Tape tape;
    const TapeScope scope(context, &tape);
    const Tensor loss = model->loss(tokens, targets);
    tape.backward(loss);
    optimizer.step(rate);
    losses.push_back(loss.item());
  }
  return losses;
}

TEST(HalfModel, TrainsLikeF32) {
  const auto f32 = losses_of(DType::f32, 1e-3, 20), half = losses_of(DType::bf16, 1e-3, 20);
  EXPECT_LT(f32.back(), 0.9 * f32.front());
  for (std::size_t i = 0; i < f32.size(); ++i) EXPECT_NEAR(half[i], f32[i], 0.01 * f32[i]) << i;
}

TEST(HalfModel, DtypeIsSetBeforeMemory) {
  Context context;
  const auto model = make_model(context, preset("gpt-nano"));
  EXPECT_THROW(model->set_dtype(DType::i32), InvalidUsage);
  model->materialize(0);
  EXPECT_THROW(model->set_dtype(DType::bf16), InvalidUsage);
}

}  // namespace
}  // namespace tessera::nn::test
