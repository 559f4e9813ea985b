// Own products must equal their definition to the bit: a serial chain of fused multiply-adds by the standard library.
#include <array>
#include <cmath>
#include <cstdint>
#include <string>

#include "tessera/base/error.h"
#include "tessera/nn/kernels/fp8.h"
#include "tessera/nn/kernels/gemm.h"
#include "tests/nn/kernels/support.h"

namespace tessera::nn::kernels {
namespace {
using namespace test;
using base::bf16;
using base::f16;

constexpr auto kNo = Transpose::no, kYes = Transpose::yes;

struct Form {
  Transpose ta = kNo, tb = kNo;
  std::size_t m = 0, n = 0, k = 0;
  bool accumulate = false;
};

template <class T>
struct Inputs {
  explicit Inputs(const Form& f) {
    for (const double x : random_vector<double>(f.m * f.k, 1)) a.push_back(static_cast<T>(static_cast<OpMath<T>>(x)));
    for (const double x : random_vector<double>(f.k * f.n, 2)) b.push_back(static_cast<T>(static_cast<OpMath<T>>(x)));
    for (const double x : random_vector<double>(f.m * f.n, 3)) c.push_back(static_cast<T>(static_cast<OpMath<T>>(x)));
  }
  std::vector<T> a, b, c;
};

/// The sums in the order of k, or, as the negative control, against it.
template <class T>
std::vector<T> definition(const Form& f, const Inputs<T>& in, bool backwards = false) {
  using Sum = OpMath<T>;
  std::vector<T> c(f.m * f.n);
  for (std::size_t i = 0; i < f.m; ++i)
    for (std::size_t j = 0; j < f.n; ++j) {
      Sum sum = f.accumulate ? static_cast<Sum>(in.c[i * f.n + j]) : Sum(0);
      for (std::size_t step = 0; step < f.k; ++step) {
        const std::size_t l = backwards ? f.k - 1 - step : step;
        sum = std::fma(static_cast<Sum>(f.ta == kYes ? in.a[l * f.m + i] : in.a[i * f.k + l]),
                       static_cast<Sum>(f.tb == kYes ? in.b[j * f.k + l] : in.b[l * f.n + j]), sum);
      }
      c[i * f.n + j] = static_cast<T>(sum);
    }
  return c;
}

template <class T>
std::vector<T> product(ThreadPool& pool, const Form& f, const Inputs<T>& in, Products products = Products::own) {
  std::vector<T> c = in.c;
  if (!f.accumulate) std::fill(c.begin(), c.end(), static_cast<T>(NAN));  // must not be read
  gemm<T>(pool,
          {.trans_a = f.ta,
           .trans_b = f.tb,
           .m = f.m,
           .n = f.n,
           .k = f.k,
           .a = in.a.data(),
           .b = in.b.data(),
           .accumulate = f.accumulate,
           .c = c.data()},
          products);
  return c;
}

/// Edges of register tiles and of cache blocks in every dimension.
constexpr std::array<std::array<std::size_t, 3>, 9> kShapes = {{{1, 1, 1},
                                                                {3, 5, 7},
                                                                {1, 33, 13},
                                                                {65, 40, 17},
                                                                {13, 97, 257},
                                                                {145, 50, 64},
                                                                {577, 25, 9},
                                                                {5, 777, 30},
                                                                {30, 24, 520}}};

template <class T>
class OwnProduct : public testing::Test {};
using Types = testing::Types<float, double, bf16, f16>;
TYPED_TEST_SUITE(OwnProduct, Types);

TYPED_TEST(OwnProduct, EqualsDefinitionBitwise) {
  using T = TypeParam;
  ThreadPool one(1), three(3);
  for (const auto& [m, n, k] : kShapes)
    for (const Transpose ta : {kNo, kYes})
      for (const Transpose tb : {kNo, kYes})
        for (const bool accumulate : {false, true}) {
          const Form form{ta, tb, m, n, k, accumulate};
          const Inputs<T> in(form);
          const std::vector<T> expected = definition(form, in);
          EXPECT_TRUE(same_bits(product<T>(one, form, in), expected)) << m << " " << n << " " << k;
          EXPECT_TRUE(same_bits(product<T>(three, form, in), expected)) << "3 threads: " << m << " " << n << " " << k;
        }
}

TYPED_TEST(OwnProduct, DetectsAnotherOrder) {
  const Form form{kNo, kNo, 40, 400, 2000, false};  // of bf16, about one element in a thousand differs
  const Inputs<TypeParam> in(form);
  EXPECT_FALSE(same_bits(definition(form, in), definition(form, in, true)));
}

TYPED_TEST(OwnProduct, EmptySumsAreWritten) {
  ThreadPool pool;
  for (const bool accumulate : {false, true}) {
    const Form form{kNo, kYes, 3, 5, 0, accumulate};
    const Inputs<TypeParam> in(form);
    EXPECT_TRUE(same_bits(product<TypeParam>(pool, form, in), definition(form, in)));
  }
}

/// A sum divided along k continues where it was, so gradients that are added batch by batch are those of one batch.
TEST(OwnProducts, AccumulatedPartsEqualWhole) {
  ThreadPool pool;
  const Form whole{kYes, kNo, 40, 70, 300, false};
  const Inputs<float> in(whole);
  const std::vector<float> expected = product<float>(pool, whole, in);
  for (const std::size_t cut : {1, 99, 256, 299}) {
    std::vector<float> c(whole.m * whole.n, NAN);
    GemmArgs<float> args{.trans_a = kYes, .m = whole.m, .n = whole.n, .k = cut, .c = c.data()};
    args.a = in.a.data(), args.b = in.b.data();
    gemm<float>(pool, args, Products::own);
    args.a += cut * whole.m, args.b += cut * whole.n, args.k = whole.k - cut, args.accumulate = true;
    gemm<float>(pool, args, Products::own);
    EXPECT_TRUE(same_bits(c, expected)) << cut;
  }
}

/// Rows of C do not depend on the others: a batch may be computed row by row.
TEST(OwnProducts, RowsAndColumnsAreIndependent) {
  ThreadPool pool;
  const Form whole{kNo, kNo, 30, 90, 64, false};
  const Inputs<bf16> in(whole);
  const std::vector<bf16> expected = product<bf16>(pool, whole, in);
  for (const std::size_t row : {0, 7, 29}) {
    std::vector<bf16> c(11);
    gemm<bf16>(pool,
               {.m = 1, .n = 11, .k = 64, .a = in.a.data() + row * 64, .b = in.b.data() + 50, .ldb = 90, .c = c.data()},
               Products::own);
    const auto* begin = expected.data() + row * 90 + 50;
    EXPECT_TRUE(same_bits(c, std::vector<bf16>(begin, begin + 11)));
  }
}

TEST(OwnProducts, LinearStartsAtBias) {
  ThreadPool pool(2);
  const std::size_t rows = 50, in = 24, out = 210;
  const auto x = random_vector<float>(rows * in, 1), w = random_vector<float>(in * out, 2),
             bias = random_vector<float>(out, 3);
  for (const WeightLayout layout : {WeightLayout::in_out, WeightLayout::out_in}) {
    std::vector<float> y(rows * out, NAN);
    linear_forward<float>(pool, {{rows, in, out, layout}, x.data(), w.data(), bias.data(), y.data()}, Products::own);
    for (std::size_t row = 0; row < rows; ++row)
      for (std::size_t column = 0; column < out; ++column) {
        float sum = bias[column];
        for (std::size_t l = 0; l < in; ++l)
          sum =
              std::fma(x[row * in + l], layout == WeightLayout::in_out ? w[l * out + column] : w[column * in + l], sum);
        ASSERT_EQ(y[row * out + column], sum);
      }
  }
}

/// Products of f8 numbers are exact in f32, so their sums are those of f32 products.
TEST(OwnProducts, Fp8EqualsF32OfDecodedNumbers) {
  ThreadPool pool;
  const std::size_t m = 130, n = 272, k = 528;
  std::vector<std::uint8_t> a(m * k), b(n * k);
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = encode_fp8(Fp8Format::e4m3, std::sin(static_cast<float>(i)));
  for (std::size_t i = 0; i < b.size(); ++i) b[i] = encode_fp8(Fp8Format::e4m3, std::cos(static_cast<float>(i)));
  std::vector<float> af, bf, c(m * n), expected(m * n);
  for (const std::uint8_t code : a) af.push_back(decode_fp8(Fp8Format::e4m3, code));
  for (const std::uint8_t code : b) bf.push_back(decode_fp8(Fp8Format::e4m3, code));
  const float one = 1;
  Fp8ProductArgs args;
  args.a = {a.data(), Fp8Format::e4m3, &one}, args.b = {b.data(), Fp8Format::e4m3, &one};
  args.dtype = base::DType::f32, args.m = m, args.n = n, args.k = k, args.c = c.data();
  fp8_product(pool, args, Products::own);
  gemm<float>(pool, {.trans_b = kYes, .m = m, .n = n, .k = k, .a = af.data(), .b = bf.data(), .c = expected.data()},
              Products::own);
  EXPECT_TRUE(same_bits(c, expected));
}

/// A library sums in another order, so a page's hash is everybody's only with own products.
TEST(OwnProducts, DetectsLibrary) {
  ThreadPool pool;
  const Form form{kNo, kNo, 200, 300, 700, false};
  const Inputs<float> in(form);
  EXPECT_FALSE(same_bits(product<float>(pool, form, in, Products::library), definition(form, in)));
}

TEST(OwnProducts, NamesAndParses) {
  EXPECT_EQ(products_name(Products::own), "tessera");
  EXPECT_EQ(parse_products("own"), Products::own);
  EXPECT_EQ(parse_products("library"), Products::library);
  for (const char* text : {"", "Own", "blas"}) EXPECT_THROW(parse_products(text), base::InvalidUsage) << text;
  EXPECT_TRUE(has_product(Products::own, base::DType::f16));
}

}  // namespace
}  // namespace tessera::nn::kernels
