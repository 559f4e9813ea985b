// CUDA kernels that combine elements of a row or of a column, emulated, against the host's in double.
#include <numeric>

#include "tests/nn/ops/cuda/compare.h"

namespace tessera::nn::test {
namespace {

template <class T>
class CudaRows : public testing::Test {};
using Types = testing::Types<float, double, f16, bf16>;
TYPED_TEST_SUITE(CudaRows, Types);

struct Rows {
  std::size_t rows, width;
};
constexpr Rows kRows[] = {{1, 1}, {3, 5}, {37, 64}, {19, 300}};

TYPED_TEST(CudaRows, LayerNormForward) {
  using T = TypeParam;
  for (const Rows r : kRows) {
    const auto x = numbers<T>("x", r.rows * r.width), w = numbers<T>("w", r.width), b = numbers<T>("b", r.width);
    expect_as_in_double<T>(
        [&]<class U>(KernelTable<U>& k, Stream& s) {
          Array<U> in(x), weight(w), bias(b);
          Array<U> y = Array<U>::poisoned(x.size()), plain = Array<U>::poisoned(x.size());
          auto mean = std::make_unique<Array<OpMath<U>>>(std::vector<double>(r.rows, NAN));
          auto rstd = std::make_unique<Array<OpMath<U>>>(std::vector<double>(r.rows, NAN));
          k.layer_norm_forward(s, {r.rows, r.width, in.data(), weight.data(), bias.data(), OpMath<U>(1e-3), y.data(),
                                   mean->data(), rstd->data()});
          k.layer_norm_forward(s, {r.rows, r.width, in.data(), weight.data(), nullptr, OpMath<U>(1e-3), plain.data()});
          return y.values() + plain.values() + mean->values() + rstd->values();
        },
        60);
  }
}

/// Gradients of layer norm (`centered`) or RMS norm, each overwritten and accumulated, dx also in place.
template <class T>
void check_norm_backward(Rows r, bool centered) {
  const auto x = numbers<T>("x", r.rows * r.width), w = numbers<T>("w", r.width), dy = numbers<T>("dy", x.size());
  const auto rstd = numbers<OpMath<T>>("rstd", r.rows, 0.3), mean = numbers<OpMath<T>>("mean", r.rows, 0.3);
  expect_as_in_double<T>(
      [&]<class U>(KernelTable<U>& k, Stream& s) {
        Array<U> in(x), weight(w), from(dy), to(dy), dw(w), db(w);
        Array<U> dw_new = Array<U>::poisoned(r.width);
        Array<OpMath<U>> m(mean), q(rstd);
        const auto run = [&](U* dx, U* dweight, U* dbias, bool accumulate) {
          if (centered) {
            k.layer_norm_backward(s, {r.rows, r.width, in.data(), weight.data(), m.data(), q.data(), from.data(), dx,
                                      dweight, dbias, accumulate, accumulate, accumulate});
          } else {
            k.rms_norm_backward(s, {r.rows, r.width, in.data(), weight.data(), q.data(), from.data(), dx, dweight,
                                    accumulate, accumulate});
          }
        };
        run(to.data(), dw.data(), db.data(), true);
        run(from.data(), dw_new.data(), nullptr, false);
        return to.values() + dw.values() + db.values() + from.values() + dw_new.values();
      },
      60);
}

TYPED_TEST(CudaRows, NormsBackward) {
  for (const Rows r : kRows)
    for (const bool centered : {false, true}) check_norm_backward<TypeParam>(r, centered);
}

TYPED_TEST(CudaRows, RmsNormForward) {
  using T = TypeParam;
  const Rows r{7, 131};
  const auto x = numbers<T>("x", r.rows * r.width), w = numbers<T>("w", r.width);
  expect_as_in_double<T>(
      [&]<class U>(KernelTable<U>& k, Stream& s) {
        Array<U> in(x), weight(w);
        Array<U> y = Array<U>::poisoned(x.size());
        auto rstd = std::make_unique<Array<OpMath<U>>>(std::vector<double>(r.rows, NAN));
        k.rms_norm_forward(s, {r.rows, r.width, in.data(), weight.data(), OpMath<U>(1e-3), y.data(), rstd->data()});
        return y.values() + rstd->values();
      },
      30);
}

TYPED_TEST(CudaRows, PartialNorms) {
  using T = TypeParam;
  using kernels::Norm;
  for (const Norm norm : {Norm::one, Norm::two, Norm::three, Norm::infinity})
    for (const std::size_t count : {0U, 1U, 255U, 16384U, 40001U}) {
      const auto x = numbers<T>("x", count);
      double powers[4] = {};
      for (const double v : x) {
        powers[0] += std::abs(v);
        powers[1] += v * v;
        powers[2] += std::abs(v * v * v);
        powers[3] = std::max(powers[3], std::abs(v));
      }
      std::vector<double> parts;
      const auto part_of = [&](const std::vector<double>& values) {
        double part = 0;
        Devices().on_device([&](DeviceKernels& k, Stream& stream) {
          Array<T> in(values);
          Array<double> out({NAN});
          k.of<T>()->norm_part(stream, norm, in.data(), count, out.data());
          part = out.values()[0];
        });
        return part;
      };
      for (int order = 0; order < kThreadOrders; ++order) {
        set_thread_order(order);
        parts.push_back(part_of(x));
      }
      set_thread_order(0);
      const double expected = powers[static_cast<int>(norm)];
      EXPECT_NEAR(parts[0], expected, 1e-12 * (1 + expected));
      for (const double part : parts) EXPECT_EQ(part, parts[0]);
      if (count == 0) continue;
      auto bad = x;
      bad[count / 2] = NAN;
      EXPECT_TRUE(std::isnan(part_of(bad)));
    }
}

TYPED_TEST(CudaRows, LinearWithBias) {
  using T = TypeParam;
  const std::size_t rows = 53, in = 7, out = 139;
  const auto x = numbers<T>("x", rows * in), w = numbers<T>("w", in * out), b = numbers<T>("b", out),
             dy = numbers<T>("dy", rows * out);
  for (const auto layout : {kernels::WeightLayout::out_in, kernels::WeightLayout::in_out}) {
    expect_as_in_double<T>(
        [&]<class U>(KernelTable<U>& k, Stream& s) {
          Array<U> a(x), weight(w), bias(b), from(dy), dx(x), db(b);
          Array<U> y = Array<U>::poisoned(dy.size()), dw = Array<U>::poisoned(w.size());
          const kernels::LinearShape shape{rows, in, out, layout};
          k.linear_forward(s, {shape, a.data(), weight.data(), bias.data(), y.data()});
          k.linear_backward(
              s, {shape, a.data(), weight.data(), from.data(), dx.data(), dw.data(), db.data(), true, false, true});
          return y.values() + dx.values() + dw.values() + db.values();
        },
        200);
  }
}

/// Widths that cuBLASLt's epilogue supports and ones that it doesn't; GELU, which it has, and another activation.
TYPED_TEST(CudaRows, LinearWithActivation) {
  using T = TypeParam;
  const std::size_t rows = 53, in = 7;
  for (const std::size_t out : {std::size_t{136}, std::size_t{139}})
    for (const auto kind : {kernels::Activation::gelu_tanh, kernels::Activation::silu}) {
      const auto x = numbers<T>("x", rows * in), w = numbers<T>("w", in * out), b = numbers<T>("b", out);
      expect_as_in_double<T>(
          [&]<class U>(KernelTable<U>& k, Stream& s) {
            Array<U> a(x), weight(w), bias(b);
            Array<U> y = Array<U>::poisoned(rows * out), activated = Array<U>::poisoned(rows * out);
            k.linear_forward(s, {.shape = {rows, in, out},
                                 .x = a.data(),
                                 .weight = weight.data(),
                                 .bias = bias.data(),
                                 .y = y.data(),
                                 .activated = activated.data(),
                                 .activation = kind});
            return y.values() + activated.values();
          },
          200);
    }
}

}  // namespace
}  // namespace tessera::nn::test
