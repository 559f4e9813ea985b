#include "tessera/nn/kernels/cpu/products.h"

#include <gmock/gmock.h>

#include <array>
#include <cstring>
#include <type_traits>

#include "tessera/nn/kernels/gemm.h"
#include "tests/nn/kernels/support.h"

namespace tessera::nn::kernels {
namespace {
using namespace test;
using base::bf16;
using base::DType;

constexpr auto kNo = Transpose::no, kYes = Transpose::yes;
constexpr std::array<std::array<std::size_t, 3>, 6> kShapes = {
    {{3, 5, 7}, {1, 33, 13}, {65, 40, 17}, {520, 200, 9}, {30, 900, 11}, {384, 96, 512}}};

template <class T>
std::vector<T> rounded(const std::vector<float>& values) {
  std::vector<T> out;
  for (const float value : values) out.push_back(static_cast<T>(value));
  return out;
}

struct Form {
  Transpose ta = kNo, tb = kNo;
  std::size_t m = 0, n = 0, k = 0;
  bool accumulate = false;
};

/// op(A) op(B), plus 1.5 where it accumulates, of the rounded inputs, in double.
template <class T>
std::vector<double> definition(const Form& f, const std::vector<T>& a, const std::vector<T>& b) {
  std::vector<double> c(f.m * f.n);
  for (std::size_t i = 0; i < f.m; ++i)
    for (std::size_t j = 0; j < f.n; ++j) {
      double sum = f.accumulate ? 1.5 : 0.0;
      for (std::size_t l = 0; l < f.k; ++l)
        sum += static_cast<double>(static_cast<float>(f.ta == kYes ? a[l * f.m + i] : a[i * f.k + l])) *
               static_cast<double>(static_cast<float>(f.tb == kYes ? b[j * f.k + l] : b[l * f.n + j]));
      c[i * f.n + j] = sum;
    }
  return c;
}

template <class T>
std::vector<T> product(ThreadPool& pool, const Form& f, const T* a, const T* b) {
  std::vector<T> c(f.m * f.n, static_cast<T>(f.accumulate ? 1.5F : NAN));
  if constexpr (std::is_same_v<T, float>) {
    gemm<T>(pool, {.trans_a = f.ta,
                   .trans_b = f.tb,
                   .m = f.m,
                   .n = f.n,
                   .k = f.k,
                   .a = a,
                   .b = b,
                   .accumulate = f.accumulate,
                   .c = c.data()});
  } else {
    const bool ta = f.ta == kYes, tb = f.tb == kYes;
    multiply({.dtype = DType::bf16,
              .m = f.m,
              .n = f.n,
              .k = f.k,
              .a = a,
              .a_row = ta ? 1 : f.k,
              .a_column = ta ? f.m : 1,
              .b = b,
              .b_row = tb ? 1 : f.n,
              .b_column = tb ? f.k : 1,
              .c = c.data(),
              .c_row = f.n,
              .accumulate = f.accumulate});
  }
  return c;
}

template <class T>
void hold_against_definition(double bound) {
  ThreadPool pool(2);
  for (const auto& [m, n, k] : kShapes)
    for (const Transpose ta : {kNo, kYes})
      for (const Transpose tb : {kNo, kYes})
        for (const bool accumulate : {false, true}) {
          const Form form{ta, tb, m, n, k, accumulate};
          const auto a = rounded<T>(random_vector<float>(m * k, 1)), b = rounded<T>(random_vector<float>(k * n, 2));
          const auto c = product<T>(pool, form, a.data(), b.data());
          const auto expected = definition(form, a, b);
          double scale = 0, worst = 0;
          for (std::size_t i = 0; i < c.size(); ++i) {
            scale = std::max(scale, std::abs(expected[i]));
            worst = std::max(worst, std::abs(static_cast<double>(static_cast<float>(c[i])) - expected[i]));
          }
          EXPECT_LT(worst, bound * scale) << m << " " << n << " " << k;
        }
}

TEST(OnednnMatmul, F32EqualsDefinition) { hold_against_definition<float>(2e-6); }

TEST(OnednnMatmul, Bf16IsRoundedOnceWhereSupported) {
  if (has_onednn_product(DType::bf16)) hold_against_definition<bf16>(1.0 / 256);  // half of the last place
}

template <class T>
void hold_bits() {
  ThreadPool one(1), three(3);
  for (const auto& [m, n, k] : {std::array<std::size_t, 3>{1100, 97, 70}, {515, 600, 384}, {33, 1000, 65}}) {
    const Form form{kYes, kNo, m, n, k, false};
    const auto a = rounded<T>(random_vector<float>(m * k, 1)), b = rounded<T>(random_vector<float>(k * n, 2));
    const auto expected = product<T>(one, form, a.data(), b.data());
    const auto same = [&](const std::vector<T>& c) {
      return std::memcmp(c.data(), expected.data(), c.size() * sizeof(T)) == 0;
    };
    EXPECT_TRUE(same(product<T>(three, form, a.data(), b.data()))) << "threads";
    for (const std::size_t shift : {1, 3, 8}) {
      std::vector<T> a2(m * k + shift), b2(k * n + shift);
      std::copy(a.begin(), a.end(), a2.begin() + static_cast<std::ptrdiff_t>(shift));
      std::copy(b.begin(), b.end(), b2.begin() + static_cast<std::ptrdiff_t>(shift));
      EXPECT_TRUE(same(product<T>(one, form, a2.data() + shift, b2.data() + shift))) << "memory";
    }
    std::vector<T> other = b;  // the negative control
    other[0] = static_cast<T>(static_cast<float>(other[0]) + 1.0F);
    EXPECT_FALSE(same(product<T>(one, form, a.data(), other.data())));
  }
}

TEST(OnednnMatmul, BitsAreIndependentOfThreadsAndMemory) {
  hold_bits<float>();
  if (has_onednn_product(DType::bf16)) hold_bits<bf16>();
}

TEST(OnednnMatmul, LinearAddsBiasInSum) {
  ThreadPool pool(2);
  const std::size_t rows = 530, in = 24, out = 210;
  const auto x = random_vector<float>(rows * in, 1), w = random_vector<float>(in * out, 2),
             bias = random_vector<float>(out, 3);
  std::vector<float> y(rows * out, NAN);
  linear_forward<float>(pool, {{rows, in, out, WeightLayout::in_out}, x.data(), w.data(), bias.data(), y.data()});
  for (const std::size_t row : {0, 1, 511, 512, 529})
    for (std::size_t column = 0; column < out; ++column) {
      double sum = bias[column];
      for (std::size_t l = 0; l < in; ++l) sum += static_cast<double>(x[row * in + l]) * w[l * out + column];
      ASSERT_NEAR(y[row * out + column], sum, 1e-5);
    }
}

TEST(OnednnMatmul, NamesLibrary) {
  EXPECT_THAT(products_name(),
              testing::ContainsRegex(has_onednn_product(DType::f32) ? "^oneDNN [0-9.]+ .avx512" : "OpenBLAS"));
  EXPECT_FALSE(has_onednn_product(DType::f64));
  EXPECT_FALSE(has_onednn_product(DType::f16));
}

}  // namespace
}  // namespace tessera::nn::kernels
