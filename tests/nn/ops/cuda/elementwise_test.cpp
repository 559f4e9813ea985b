// Element-wise CUDA kernels, emulated, against the host's in double, and bitwise against the host's in f32.
#include "tests/nn/ops/cuda/compare.h"

namespace tessera::nn::test {
namespace {

template <class T>
class CudaElements : public testing::Test {};
using Types = testing::Types<float, double, f16, bf16>;
TYPED_TEST_SUITE(CudaElements, Types);

/// Whole vectors, a tail, and memory that isn't aligned to a vector.
struct Place {
  std::size_t count, offset;
};
constexpr Place kPlaces[] = {{1, 0}, {1024, 0}, {1027, 0}, {333, 1}, {0, 0}};

template <class T, class Operation>
void check(const Operation& operation, double units) {
  expect_as_in_double<T>(operation, units);
  if constexpr (std::is_same_v<T, float>) expect_bits_of_the_host(operation);
}

TYPED_TEST(CudaElements, AssignAddScaleFill) {
  using T = TypeParam;
  for (const Place at : kPlaces) {
    const auto x = numbers<T>("x", at.count), y = numbers<T>("y", at.count);
    check<T>(
        [&]<class U>(KernelTable<U>& k, Stream& s) {
          Array<U> a(x, at.offset), b(y, at.offset), kept(y, at.offset), scaled(y, at.offset);
          auto out = std::make_unique<Array<U>>(y, at.offset);
          Array<U> copy = Array<U>::poisoned(at.count, at.offset), sum = Array<U>::poisoned(at.count, at.offset);
          k.fill(s, rounded<U>(1.5), out->data(), at.count);
          k.assign(s, {a.data(), copy.data(), at.count, false});
          k.assign(s, {a.data(), kept.data(), at.count, true});
          k.add(s, {a.data(), b.data(), sum.data(), at.count});
          k.scale(s, {a.data(), OpMath<U>(0.375), scaled.data(), at.count, true});
          k.scale(s, {a.data(), OpMath<U>(-2.5), a.data(), at.count, false});
          return out->values() + copy.values() + kept.values() + sum.values() + scaled.values() + a.values();
        },
        2);
  }
}

TYPED_TEST(CudaElements, Transpose) {
  using T = TypeParam;
  const auto x = numbers<T>("x", 3 * 37 * 70);
  check<T>(
      [&]<class U>(KernelTable<U>& k, Stream& s) {
        Array<U> in(x);
        Array<U> out = Array<U>::poisoned(x.size());
        k.transpose(s, {in.data(), out.data(), 3, 37, 70});
        return out.values();
      },
      0);
}

TYPED_TEST(CudaElements, Activations) {
  using T = TypeParam;
  using kernels::Activation;
  for (const Activation kind : {Activation::relu, Activation::gelu_tanh, Activation::gelu_erf, Activation::silu}) {
    for (const bool accumulate : {false, true}) {
      const auto x = numbers<T>("x", 1003, 3.0), dy = numbers<T>("dy", 1003);
      check<T>(
          [&]<class U>(KernelTable<U>& k, Stream& s) {
            Array<U> in(x), from(dy), to(dy);
            Array<U> out = Array<U>::poisoned(x.size());
            k.activation_forward(s, {kind, in.data(), out.data(), x.size()});
            k.activation_backward(s, kind, {in.data(), from.data(), to.data(), x.size(), accumulate});
            return out.values() + to.values();
          },
          48);  // the host's own error: slopes cancel where x is large
    }
  }
}

TYPED_TEST(CudaElements, SwigluInPlace) {
  using T = TypeParam;
  const auto gate = numbers<T>("gate", 517), up = numbers<T>("up", 517), dy = numbers<T>("dy", 517);
  check<T>(
      [&]<class U>(KernelTable<U>& k, Stream& s) {
        Array<U> g(gate), u(up), d(dy), added(gate);
        Array<U> y = Array<U>::poisoned(gate.size());
        k.swiglu_forward(s, {g.data(), u.data(), y.data(), gate.size()});
        kernels::SwigluBackward<U> args{g.data(), u.data(), d.data(), added.data(), nullptr, gate.size(), true, false};
        k.swiglu_backward(s, args);
        args.dgate = g.data(), args.accumulate_dgate = false, args.dup = d.data();
        k.swiglu_backward(s, args);
        return y.values() + added.values() + g.values() + d.values();
      },
      8);
}

TYPED_TEST(CudaElements, DropoutAndNormalsEqualHost) {
  using T = TypeParam;
  const auto x = numbers<T>("x", 3 * 1001);
  check<T>(
      [&]<class U>(KernelTable<U>& k, Stream& s) {
        Array<U> in(x), added(x);
        Array<U> out = Array<U>::poisoned(x.size()), normal = Array<U>::poisoned(777);
        const RandomStream stream = dropout_stream(3, 9, "h.0", 5);
        k.dropout(s, {stream, 0.3, 3, 1001, in.data(), out.data(), false});
        k.dropout(s, {stream, 0.3, 3, 1001, in.data(), added.data(), true});
        Array<U> uniform = Array<U>::poisoned(777);
        k.fill_normal(s, {{tensor_stream(4, "w"), 1021, 1798}, OpMath<U>(0.5), OpMath<U>(0.25), normal.data()});
        k.fill_uniform(s, {{tensor_stream(4, "w"), 1021, 1798}, OpMath<U>(-0.3), OpMath<U>(0.7), uniform.data()});
        return out.values() + added.values() + normal.values() + uniform.values();
      },
      2);
}

TYPED_TEST(CudaElements, RopeForwardAndBack) {
  using T = TypeParam;
  const std::size_t batch = 2, positions = 5, heads = 3, dim = 14;
  const auto x = numbers<T>("x", batch * positions * heads * dim);
  std::vector<double> cosine(positions * dim / 2), sine(cosine.size());
  kernels::rope_table<double>(positions, dim, 100.0, cosine.data(), sine.data());
  for (double& v : cosine) v = as_double(static_cast<OpMath<T>>(v));
  for (double& v : sine) v = as_double(static_cast<OpMath<T>>(v));
  for (const bool inverse : {false, true}) {
    check<T>(
        [&]<class U>(KernelTable<U>& k, Stream& s) {
          Array<U> in(x), added(x);
          Array<OpMath<U>> c(cosine), n(sine);
          kernels::RopeArgs<U> args{batch, positions, heads, dim, c.data(), n.data(), {}, {}, inverse, true};
          args.in = kernels::heads_view<const U>(in.data(), positions, heads, dim);
          args.out = kernels::heads_view<U>(added.data(), positions, heads, dim);
          k.rope(s, args);
          args.accumulate = false;
          args.out = kernels::heads_view<U>(in.data(), positions, heads, dim);  // in place
          k.rope(s, args);
          return added.values() + in.values();
        },
        4);
  }
}

template <class U>
std::vector<double> adam_steps(KernelTable<U>& k, Stream& s, bool amsgrad, std::size_t offset) {
  const auto p = numbers<float>("p", 261), g = numbers<float>("g", 261);
  Array<U> parameter(p, offset), gradient(g, offset), m(std::vector<double>(261), offset),
      v(std::vector<double>(261), offset), most(std::vector<double>(261), offset);
  Array<double> factor({0.75});
  kernels::AdamStep<U> args{
      parameter.data(), gradient.data(), m.data(), v.data(), amsgrad ? most.data() : nullptr, 261};
  args.weight_decay = 0.1;
  for (args.step = 1; args.step < 4; ++args.step) {
    args.grad_scale_at = args.step == 2 ? factor.data() : nullptr;
    args.decoupled = args.step != 3;
    args.maximize = args.step == 3;
    k.adam_step(s, args);
  }
  return parameter.values() + m.values() + v.values() + most.values();
}

TEST(CudaOptimizers, AdamIsBitwiseEqualToHost) {
  for (const bool amsgrad : {false, true})
    for (const std::size_t offset : {0U, 3U}) {
      const auto steps = [&]<class U>(KernelTable<U>& k, Stream& s) { return adam_steps(k, s, amsgrad, offset); };
      expect_bits_of_the_host(steps);
      expect_as_in_double<double>(steps, 16);
    }
}

TEST(CudaOptimizers, SgdIsBitwiseEqualToHost) {
  const auto p = numbers<float>("p", 261), g = numbers<float>("g", 261);
  for (const bool nesterov : {false, true}) {
    const auto steps = [&]<class U>(KernelTable<U>& k, Stream& s) {
      Array<U> parameter(p), gradient(g), buffer(std::vector<double>(261)), plain(p);
      Array<double> factor({0.5});
      kernels::SgdStep<U> args{parameter.data(), gradient.data(), buffer.data(), 261};
      args.momentum = 0.9, args.weight_decay = 0.1, args.nesterov = nesterov, args.first_step = true;
      k.sgd_step(s, args);
      args.first_step = false, args.maximize = true, args.grad_scale_at = factor.data();
      k.sgd_step(s, args);
      k.sgd_step(s, {.parameter = plain.data(), .gradient = gradient.data(), .count = 261});
      return parameter.values() + buffer.values() + plain.values();
    };
    expect_bits_of_the_host(steps);
  }
}

/// f32 master weights with half-precision or f32 gradients, and the half-precision copy written with them.
template <class N>
std::vector<double> half_steps(KernelTable<float>& k, Stream& s, bool half_gradient, std::size_t offset) {
  const auto p = numbers<float>("p", 2061), g = numbers<N>("g", 2061);
  Array<float> parameter(p, offset), plain(p, offset), gradient(g, offset), m(std::vector<double>(p.size()), offset),
      v(std::vector<double>(p.size()), offset);
  Array<N> half(g, offset);
  Array<N> copy = Array<N>::poisoned(p.size(), offset), other = Array<N>::poisoned(p.size(), offset);
  kernels::AdamStep<float> adam{parameter.data(), gradient.data(), m.data(), v.data(), nullptr, p.size()};
  kernels::SgdStep<float> sgd{.parameter = plain.data(), .gradient = gradient.data(), .count = p.size()};
  adam.half = {dtype_of<N>, nullptr, copy.data()};
  sgd.half = {dtype_of<N>, nullptr, other.data()};
  if (half_gradient) {
    adam.gradient = sgd.gradient = nullptr;
    adam.half.gradient = sgd.half.gradient = half.data();
  }
  for (adam.step = 1; adam.step < 3; ++adam.step) k.adam_step(s, adam);
  k.sgd_step(s, sgd);
  std::vector<double> rounded_masters;
  for (const double value : parameter.values() + plain.values())
    rounded_masters.push_back(as_double(rounded<N>(value)));
  EXPECT_TRUE(same_bits(copy.values() + other.values(), rounded_masters));
  return parameter.values() + m.values() + v.values() + plain.values() + copy.values() + other.values();
}

template <class N>
void check_half_steps() {
  Devices devices;
  KernelTable<float>& host = *devices.host.device_kernels().f32_kernels();
  for (const std::size_t offset : {0U, 3U}) {
    const auto expected = half_steps<N>(host, devices.host.stream(), false, offset);
    EXPECT_TRUE(same_bits(half_steps<N>(host, devices.host.stream(), true, offset), expected));
    for (const bool half_gradient : {false, true}) {
      const auto got = devices.on_device(
          [&](DeviceKernels& k, Stream& s) { return half_steps<N>(*k.f32_kernels(), s, half_gradient, offset); });
      EXPECT_TRUE(same_bits(got, expected));
    }
  }
}

TEST(CudaOptimizers, MasterWeightsUseHalfGradientsAndWriteRoundedCopy) {
  check_half_steps<bf16>();
  check_half_steps<f16>();
}

TEST(CudaElements, ConversionsAreBitwiseEqualToHost) {
  Devices devices;
  const auto x = numbers<float>("x", 1031, 100.0);
  for (const DType half : {DType::f16, DType::bf16}) {
    const auto round_trip = [&](DeviceKernels& k, Stream& stream) {
      Array<float> in(x);
      Array<float> back = Array<float>::poisoned(x.size());
      Array<f16> bits(std::vector<double>(x.size()));
      k.convert(stream, {in.data(), DType::f32, bits.data(), half, x.size()});
      k.convert(stream, {bits.data(), half, back.data(), DType::f32, x.size()});
      return back.values();
    };
    const auto expected = round_trip(devices.host.device_kernels(), devices.host.stream());
    EXPECT_TRUE(same_bits(devices.on_device(round_trip), expected));
  }
}

TEST(CudaElements, PositionsAndClipping) {
  Devices devices;
  const auto check = [](DeviceKernels& k, Stream& stream) {
    Array<std::int32_t> out(std::vector<double>(35, -1));
    k.positions(stream, out.data(), 35, 7);
    for (int i = 0; i < 35; ++i) EXPECT_EQ(out.values()[static_cast<std::size_t>(i)], i % 7);
    using kernels::Norm;
    const auto clip = [&](ClipArgs args, std::vector<double> values) {
      Array<double> parts(std::move(values));
      args.parts = parts.data();
      args.count = 3;
      args.out = parts.data() + 3;
      k.clip_factor(stream, args);
      return std::pair(parts.values()[3], parts.values()[4]);
    };
    EXPECT_EQ(clip({.most = 1.5}, {1, 3, 5, 0, 0}), std::pair(3.0, 1.5 / (3.0 + 1e-6)));
    EXPECT_EQ(clip({.most = 4}, {1, 3, 5, 0, 0}), std::pair(3.0, 1.0));
    EXPECT_EQ(clip({}, {1, 3, 5, 0, 0}), std::pair(3.0, 1.0));
    EXPECT_EQ(clip({.norm = Norm::one}, {1, 3, 5, 0, 0}).first, 9.0);
    EXPECT_NEAR(clip({.norm = Norm::three}, {1, 2, 5, 0, 0}).first, 2.0, 1e-15);
    EXPECT_EQ(clip({.norm = Norm::infinity}, {1, 7, 5, 0, 0}).first, 7.0);
    EXPECT_EQ(clip({.most = 1.5, .loss_scale = 2}, {16, 15, 5, 0, 0}), std::pair(3.0, 1.5 / (3.0 + 1e-6) / 2));
    for (const double bad : {static_cast<double>(INFINITY), static_cast<double>(NAN)})
      for (const Norm norm : {Norm::one, Norm::two, Norm::three, Norm::infinity}) {
        EXPECT_TRUE(std::isnan(clip({.norm = norm, .skips = true}, {1, bad, 5, 0, 0}).second));
        EXPECT_EQ(clip({.norm = norm}, {1, bad, 5, 0, 0}).second, 1.0);  // not requested
      }
  };
  devices.on_device(check);
  check(devices.host.device_kernels(), devices.host.stream());
}

}  // namespace
}  // namespace tessera::nn::test
