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

TYPED_TEST(CudaRows, CrossEntropyWithIgnoredTargetsAndInPlace) {
  using T = TypeParam;
  const std::size_t rows = 9, vocabulary = 301;
  const auto logits = numbers<T>("logits", rows * vocabulary, 2.0);
  const std::vector<std::int32_t> some{0, 300, -100, 17, 17, -100, 255, 256, 5}, none(rows, -100);
  for (const auto& targets : {some, none}) {
    expect_as_in_double<T>(
        [&]<class U>(KernelTable<U>& k, Stream& s) {
          Array<U> x(logits), added(logits);
          Array<OpMath<U>> max(std::vector<double>(rows, 0.0)), sum(std::vector<double>(rows, 0.0));
          Array<std::int32_t> chosen(std::vector<double>(targets.begin(), targets.end()));
          Array<double> loss({NAN}), valid({NAN}), upstream({3.0});
          k.cross_entropy_forward(
              s,
              {{x.data(), chosen.data(), rows, vocabulary, -100, max.data(), sum.data()}, loss.data(), valid.data()});
          const auto backward = [&](U* out, bool accumulate) {
            k.cross_entropy_backward(s, {{x.data(), chosen.data(), rows, vocabulary, -100, max.data(), sum.data(),
                                          OpMath<U>(0), out, accumulate},
                                         upstream.data(),
                                         valid.data()});
          };
          backward(added.data(), true);
          backward(x.data(), false);
          std::vector<double> statistics;
          for (std::size_t row = 0; row < rows; ++row)
            if (targets[row] >= 0) statistics.push_back(sum.values()[row]);
          return loss.values() + valid.values() + added.values() + x.values() + statistics;
        },
        40);
  }
}

TYPED_TEST(CudaRows, EmbeddingForwardAndBackward) {
  using T = TypeParam;
  const std::size_t vocabulary = 301, width = 33, rows = 700;
  const auto table = numbers<T>("table", vocabulary * width), dy = numbers<T>("dy", rows * width, 0.25);
  std::vector<std::int32_t> ids(rows);
  for (std::size_t i = 0; i < rows; ++i) ids[i] = static_cast<std::int32_t>(i * i % 290 % 17 * (i % 3 == 0 ? 17 : 1));
  ids[5] = 300;
  expect_as_in_double<T>(
      [&]<class U>(KernelTable<U>& k, Stream& s) {
        Array<std::int32_t> rows_ids(std::vector<double>(ids.begin(), ids.end()));
        Array<U> weight(table), from(dy), y(dy), dweight(table);
        Array<U> fresh = Array<U>::poisoned(table.size()), looked_up = Array<U>::poisoned(dy.size());
        k.embedding_forward(s, {weight.data(), rows_ids.data(), looked_up.data(), rows, vocabulary, width, false});
        k.embedding_forward(s, {weight.data(), rows_ids.data(), y.data(), rows, vocabulary, width, true});
        k.embedding_backward(s, {rows_ids.data(), from.data(), fresh.data(), rows, vocabulary, width, false});
        k.embedding_backward(s, {rows_ids.data(), from.data(), dweight.data(), rows, vocabulary, width, true});
        return looked_up.values() + y.values() + fresh.values() + dweight.values();
      },
      20);
}

#if !defined(TESSERA_TEST_HOST)
TEST(CudaRowsOnly, InvalidTargetsBecomeNaN) {
  Devices().on_device([](DeviceKernels& kernels, Stream& stream) {
    KernelTable<float>& k = *kernels.f32_kernels();
    Array<float> table(std::vector<double>(4, 1.0)), y(std::vector<double>(6));
    Array<std::int32_t> ids({1, 2, -1}), targets({0, 4});
    k.embedding_forward(stream, {table.data(), ids.data(), y.data(), 3, 2, 2, false});
    EXPECT_EQ(y.values()[0], 1.0);
    for (std::size_t i = 2; i < 6; ++i) EXPECT_TRUE(std::isnan(y.values()[i])) << i;
    Array<double> loss({0.0}), valid({0.0});
    k.cross_entropy_forward(stream, {{table.data(), targets.data(), 2, 2, -100}, loss.data(), valid.data()});
    EXPECT_TRUE(std::isnan(loss.values()[0]));
  });
}

#endif

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
