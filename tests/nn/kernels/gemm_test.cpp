#include "tessera/nn/kernels/gemm.h"

#include <array>

#include "tests/nn/kernels/support.h"

namespace tessera::nn::kernels {
namespace {
using namespace test;

template <class T>
std::vector<T> product(std::size_t threads, Transpose ta, Transpose tb, std::size_t m, std::size_t n, std::size_t k,
                       T beta) {
  ThreadPool pool(threads);
  const auto a = random_vector<T>(m * k, 1), b = random_vector<T>(k * n, 2);
  std::vector<T> c(m * n, beta == 0 ? T(NAN) : T(1.5));
  gemm<T>(pool, {.trans_a = ta,
                 .trans_b = tb,
                 .m = m,
                 .n = n,
                 .k = k,
                 .a = a.data(),
                 .b = b.data(),
                 .accumulate = beta != 0,
                 .c = c.data()});
  return c;
}

std::vector<double> reference(Transpose ta, Transpose tb, std::size_t m, std::size_t n, std::size_t k, double beta) {
  const auto a = random_vector<double>(m * k, 1), b = random_vector<double>(k * n, 2);
  std::vector<double> c(m * n);
  for (std::size_t i = 0; i < m; ++i)
    for (std::size_t j = 0; j < n; ++j) {
      double sum = 0;
      for (std::size_t l = 0; l < k; ++l)
        sum +=
            (ta == Transpose::yes ? a[l * m + i] : a[i * k + l]) * (tb == Transpose::yes ? b[j * k + l] : b[l * n + j]);
      c[i * n + j] = sum + beta * 1.5;
    }
  return c;
}

TEST(Gemm, AllFormsEqualDefinition) {
  for (const Transpose ta : {Transpose::no, Transpose::yes})
    for (const Transpose tb : {Transpose::no, Transpose::yes})
      for (const auto& [m, n, k] :
           {std::array<std::size_t, 3>{3, 5, 7}, {1, 33, 13}, {65, 40, 17}, {520, 200, 9}, {30, 900, 11}, {4, 4, 0}})
        for (const double beta : {0.0, 1.0}) {
          const auto expected = reference(ta, tb, m, n, k, beta);
          EXPECT_LT(relative_difference(product<double>(2, ta, tb, m, n, k, beta), expected), 1e-14)
              << m << " " << n << " " << k;
          EXPECT_LT(relative_difference(product<float>(2, ta, tb, m, n, k, static_cast<float>(beta)), expected), 2e-6);
        }
}

TEST(Gemm, BitsForOneTwoAndThreeThreads) {
  for (const auto& [m, n, k] :
       {std::array<std::size_t, 3>{1100, 97, 70}, {515, 600, 384}, {33, 1000, 65}, {384, 1152, 301}})
    for (const Transpose ta : {Transpose::no, Transpose::yes}) {
      const auto one = product<float>(1, ta, Transpose::no, m, n, k, 0.0f);
      EXPECT_TRUE(same_bits(product<float>(2, ta, Transpose::no, m, n, k, 0.0f), one));
      EXPECT_TRUE(same_bits(product<float>(3, ta, Transpose::no, m, n, k, 0.0f), one));
    }
}

TEST(Gemm, SupportsRowStrides) {
  ThreadPool pool;
  const auto a = random_vector<double>(4 * 9, 1), b = random_vector<double>(5 * 8, 2);
  std::vector<double> c(4 * 7, 3.0);
  gemm<double>(pool,
               {.m = 4, .n = 6, .k = 5, .a = a.data(), .lda = 9, .b = b.data(), .ldb = 8, .c = c.data(), .ldc = 7});
  for (std::size_t i = 0; i < 4; ++i) {
    for (std::size_t j = 0; j < 6; ++j) {
      double sum = 0;
      for (std::size_t l = 0; l < 5; ++l) sum += a[i * 9 + l] * b[l * 8 + j];
      EXPECT_NEAR(c[i * 7 + j], sum, 1e-14);
    }
    EXPECT_EQ(c[i * 7 + 6], 3.0) << "beyond the row";
  }
}

TEST(Linear, GradientsEqualFiniteDifferences) {
  ThreadPool pool(2);
  for (const WeightLayout layout : {WeightLayout::out_in, WeightLayout::in_out})
    for (const auto& [rows, in, out] : {std::array<std::size_t, 3>{3, 5, 7}, {4, 13, 33}, {17, 7, 1}}) {
      const LinearShape shape{rows, in, out, layout};
      auto x = random_vector<double>(rows * in, 1), w = random_vector<double>(in * out, 2),
           b = random_vector<double>(out, 3);
      const auto dy = random_vector<double>(rows * out, 4);
      std::vector<double> y(rows * out, NAN);
      const auto loss = [&] {
        linear_forward<double>(pool, {shape, x.data(), w.data(), b.data(), y.data()});
        return dot(y, dy);
      };
      const auto ex = differences(x, loss), ew = differences(w, loss), eb = differences(b, loss);
      std::vector<double> dx(rows * in, NAN), dw(in * out, NAN), db(out, NAN);
      LinearBackward<double> args{shape, x.data(), w.data(), dy.data(), dx.data(), dw.data(), db.data()};
      linear_backward(pool, args);
      EXPECT_LT(relative_difference(dx, ex), kGradientTolerance);
      EXPECT_LT(relative_difference(dw, ew), kGradientTolerance);
      EXPECT_LT(relative_difference(db, eb), kGradientTolerance);
      std::vector<double> mx(rows * in, 1.0), mw(in * out, 1.0), mb(out, 1.0);
      linear_backward<double>(
          pool, {shape, x.data(), w.data(), dy.data(), mx.data(), mw.data(), mb.data(), true, true, true});
      EXPECT_LT(relative_difference(mx, plus(std::vector<double>(rows * in, 1.0), dx)), 1e-14);
      EXPECT_LT(relative_difference(mw, plus(std::vector<double>(in * out, 1.0), dw)), 1e-14);
      EXPECT_LT(relative_difference(mb, plus(std::vector<double>(out, 1.0), db)), 1e-14);
      linear_forward<double>(pool, {shape, x.data(), w.data(), nullptr, y.data()});
      const double without = y[0];
      loss();
      EXPECT_NEAR(y[0], without + b[0], 1e-14);
    }
}

}  // namespace
}  // namespace tessera::nn::kernels
