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
          k.norm_forward(s, {r.rows, r.width, in.data(), weight.data(), bias.data(), OpMath<U>(1e-3), y.data(),
                             mean->data(), rstd->data()});
          k.norm_forward(s, {r.rows, r.width, in.data(), weight.data(), nullptr, OpMath<U>(1e-3), plain.data()});
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
            k.norm_backward(s, {r.rows, r.width, in.data(), weight.data(), m.data(), q.data(), from.data(), dx, dweight,
                                dbias, accumulate, accumulate, accumulate});
          } else {
            k.norm_backward(s, {.rows = r.rows,
                                .width = r.width,
                                .x = in.data(),
                                .weight = weight.data(),
                                .rstd = q.data(),
                                .dy = from.data(),
                                .dx = dx,
                                .dweight = dweight,
                                .accumulate_dx = accumulate,
                                .accumulate_dweight = accumulate,
                                .norm = kernels::RowNorm::rms});
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
        k.norm_forward(s, {.rows = r.rows,
                           .width = r.width,
                           .x = in.data(),
                           .weight = weight.data(),
                           .eps = OpMath<U>(1e-3),
                           .y = y.data(),
                           .rstd = rstd->data(),
                           .norm = kernels::RowNorm::rms});
        return y.values() + rstd->values();
      },
      30);
}

/// The partial norm of each slice of x in double.
std::vector<double> norms_in_double(kernels::Norm norm, const std::vector<double>& x, std::size_t slices) {
  std::vector<double> parts(slices, 0.0);
  for (std::size_t i = 0; i < x.size(); ++i) {
    double& part = parts[i / (x.size() / slices)];
    const double magnitude = std::abs(x[i]);
    if (norm == kernels::Norm::infinity)
      part = std::max(part, magnitude);
    else
      part += std::pow(magnitude, 1 + static_cast<int>(norm));
  }
  return parts;
}

/// What the device computes of x, twice with the same counters.
template <class T>
std::vector<double> partial_norms(kernels::Norm norm, const std::vector<double>& x, std::size_t slices,
                                  std::size_t offset = 0) {
  return Devices().on_device([&](DeviceKernels& k, Stream& stream) {
    Array<T> in(x, offset);
    const std::vector<double> zeros(slices, 0.0);
    Array<std::int32_t> counters(zeros);
    Array<double> first = Array<double>::poisoned(slices), out = Array<double>::poisoned(slices);
    for (Array<double>* to : {&first, &out})
      k.of<T>()->norm_parts(stream, {.norm = norm,
                                     .x = in.data(),
                                     .count = x.size() / slices,
                                     .slices = slices,
                                     .counters = reinterpret_cast<std::uint32_t*>(counters.data()),
                                     .out = to->data()});
    EXPECT_TRUE(same_bits(first.values(), out.values()));
    EXPECT_EQ(counters.values(), zeros);
    return out.values();
  });
}

TYPED_TEST(CudaRows, PartialNorms) {
  using T = TypeParam;
  using kernels::Norm;
  for (const Norm norm : {Norm::one, Norm::two, Norm::three, Norm::infinity})
    for (const std::size_t count : {0U, 1U, 255U, 16384U, 40001U})
      for (const std::size_t slices : {1U, 3U}) {
        const auto x = numbers<T>("x", count * slices);
        const auto expected = norms_in_double(norm, x, slices);
        const auto parts = partial_norms<T>(norm, x, slices);
        for (std::size_t i = 0; i < slices; ++i) EXPECT_NEAR(parts[i], expected[i], 1e-12 * (1 + expected[i]));
        for (int order = 0; order < kThreadOrders; ++order) {
          set_thread_order(order);
          EXPECT_TRUE(same_bits(partial_norms<T>(norm, x, slices, 1), parts)) << "addresses and orders don't show";
        }
        set_thread_order(0);
        if (count == 0) continue;
        auto bad = x;
        bad[count / 2] = NAN;
        const auto spoiled = partial_norms<T>(norm, bad, slices);
        EXPECT_TRUE(std::isnan(spoiled[0]));
        EXPECT_TRUE(std::equal(spoiled.begin() + 1, spoiled.end(), parts.begin() + 1)) << "the others don't change";
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
          200, 4.0);  // cuBLASLt's GELU takes tanh from an instruction, which is off by up to 2^-11: half a unit of f16
    }
}

}  // namespace
}  // namespace tessera::nn::test
