// Quantization and products of the host against plain loops in double.
#include "tessera/nn/kernels/fp8.h"

#include <algorithm>
#include <array>

#include "tessera/base/error.h"
#include "tests/nn/kernels/support.h"

namespace tessera::nn::kernels {
namespace {
using namespace test;
using base::bf16;
using base::f16;

template <class T>
std::vector<T> values_of(std::size_t count, std::uint64_t seed, double deviation = 1) {
  return cast<T>(random_vector<float>(count, seed, deviation));
}

struct Codes {
  std::vector<std::uint8_t> out, transposed;
  float descale = 0;
};

template <class T>
Codes quantize(const std::vector<T>& in, std::size_t rows, Fp8QuantizeArgs args = {}, std::size_t threads = 2) {
  ThreadPool pool(threads);
  Codes codes;
  args.in = in.data();
  args.dtype = base::dtype_of<T>;
  args.rows = rows;
  args.columns = in.size() / rows;
  codes.out.assign(in.size(), 0xEE);
  codes.transposed.assign(args.columns * fp8_padded(rows), 0xEE);
  args.descale = &codes.descale;
  args.out = codes.out.data();
  args.transposed = codes.transposed.data();
  fp8_quantize(pool, args);
  return codes;
}

template <class T>
double amax(const std::vector<T>& values) {
  double most = 0;
  for (const T value : values) most = std::max(most, std::abs(static_cast<double>(static_cast<float>(value))));
  return most;
}

template <class T>
void check_quantization() {
  for (const auto& [rows, columns] : {std::array<std::size_t, 2>{1, 16}, {16, 32}, {65, 48}, {200, 112}}) {
    const auto in = values_of<T>(rows * columns, rows, 0.003);
    for (const Fp8Format format : {Fp8Format::e4m3, Fp8Format::e5m2}) {
      const Codes codes = quantize(in, rows, {.format = format});
      const double scale = std::ldexp(1.0, fp8_exponent(format, static_cast<float>(amax(in))));
      EXPECT_EQ(codes.descale, 1 / scale);
      const std::size_t padded = fp8_padded(rows);
      for (std::size_t r = 0; r < padded; ++r)
        for (std::size_t c = 0; c < columns; ++c) {
          const std::uint8_t code = r < rows ? codes.out[r * columns + c] : 0;
          ASSERT_EQ(codes.transposed[c * padded + r], code) << r << " " << c;
          if (r >= rows) continue;
          const double value = static_cast<double>(static_cast<float>(in[r * columns + c]));
          ASSERT_EQ(code, encode_fp8(format, static_cast<float>(value * scale)));
          // half a unit of the last place, or half the smallest subnormal
          const double bound =
              std::max(std::abs(value) / (format == Fp8Format::e4m3 ? 16 : 8),
                       std::ldexp(static_cast<double>(codes.descale), format == Fp8Format::e4m3 ? -10 : -17));
          ASSERT_LE(std::abs(decode_fp8(format, code) * codes.descale - value), bound);
        }
      EXPECT_EQ(quantize(in, rows, {.format = format}, 1).out, codes.out);
    }
  }
}

TEST(Fp8Kernels, QuantizeWholeTensorsByTheirAmax) {
  check_quantization<float>();
  check_quantization<f16>();
  check_quantization<bf16>();
}

TEST(Fp8Kernels, OtherTensorsOfTheSameAmaxHaveTheSameScale) {
  auto in = values_of<float>(64 * 32, 1);
  const float descale = quantize(in, 64).descale;
  for (float& value : in)
    if (std::abs(value) < amax(in)) value /= 3;
  EXPECT_EQ(quantize(in, 64).descale, descale);
  in[5] = static_cast<float>(5 * amax(in));
  EXPECT_NE(quantize(in, 64).descale, descale) << "the control";
}

TEST(Fp8Kernels, ValuesThatAreNotFiniteBecomeNanAndLeaveScale) {
  auto in = values_of<float>(64 * 32, 1);
  const Codes before = quantize(in, 64);
  in[3] = INFINITY;
  in[70] = NAN;
  const Codes after = quantize(in, 64);
  EXPECT_EQ(after.descale, before.descale);
  for (std::size_t i = 0; i < in.size(); ++i)
    EXPECT_EQ(after.out[i] & 127, i == 3 || i == 70 ? 127 : before.out[i] & 127) << i;
}

TEST(Fp8Kernels, WithoutScalingFactorIsOneAndSmallValuesVanish) {
  const auto in = values_of<float>(64 * 32, 1, 1e-7);
  const Codes none = quantize(in, 64, {.format = Fp8Format::e5m2, .scaling = Fp8Scaling::none});
  EXPECT_EQ(none.descale, 1);
  EXPECT_TRUE(std::all_of(none.out.begin(), none.out.end(), [](std::uint8_t code) { return (code & 127) == 0; }));
  const Codes current = quantize(in, 64, {.format = Fp8Format::e5m2});
  EXPECT_FALSE(
      std::all_of(current.out.begin(), current.out.end(), [](std::uint8_t code) { return (code & 127) == 0; }));
}

/// The scale follows the largest amax of the last kFp8History updates; the newest tensor counts from the next one on.
TEST(Fp8Kernels, DelayedScalingUsesEarlierTensors) {
  std::array<float, 1 + kFp8History> history{};
  const auto tensor = [](float most) { return std::vector<float>(32, most); };
  const auto descale = [&](float most, bool updates) {
    return quantize(tensor(most), 2, {.scaling = Fp8Scaling::delayed, .history = history.data(), .updates = updates})
        .descale;
  };
  const auto of = [](float most) { return fp8_power(-fp8_exponent(Fp8Format::e4m3, most)); };
  EXPECT_EQ(descale(8, false), of(8)) << "nothing is known: its own";
  EXPECT_EQ(history[0], 0) << "no update";
  EXPECT_EQ(descale(8, true), of(8)) << "the first: its own";
  EXPECT_EQ(history[0], 8);
  EXPECT_EQ(descale(100, true), of(8)) << "it saturates";
  EXPECT_EQ(quantize(tensor(100), 2, {.scaling = Fp8Scaling::delayed, .history = history.data()}).descale, of(8))
      << "a recomputation has the scale of the forward";
  for (std::size_t i = 0; i < kFp8History; ++i) EXPECT_EQ(descale(1, true), of(100)) << i;
  EXPECT_EQ(descale(1, true), of(1)) << "forgotten";
  EXPECT_EQ(history[0], 1);
}

template <class T>
struct Product {
  Fp8Format a_format = Fp8Format::e4m3;
  std::size_t m = 0, n = 0, k = 0;
  bool bias = false, accumulate = false;

  /// The largest error, relative to the sum of the magnitudes of the terms.
  double error(std::size_t threads, std::vector<T>* result = nullptr) const {
    const Codes a = quantize(values_of<T>(m * k, 1, 0.02), m, {.format = a_format}),
                b = quantize(values_of<T>(n * k, 2, 3), n);
    const std::vector<T> biases = values_of<T>(n, 3);
    const std::vector<T> before = values_of<T>(m * n, 4);
    std::vector<T> c = before;
    ThreadPool pool(threads);
    fp8_product(pool, {.a = {a.out.data(), a_format, &a.descale},
                       .b = {b.out.data(), Fp8Format::e4m3, &b.descale},
                       .m = m,
                       .n = n,
                       .k = k,
                       .dtype = base::dtype_of<T>,
                       .bias = bias ? biases.data() : nullptr,
                       .c = c.data(),
                       .accumulate = accumulate});
    if (result != nullptr) *result = c;
    double worst = 0;
    for (std::size_t i = 0; i < m; ++i)
      for (std::size_t j = 0; j < n; ++j) {
        double sum = 0, magnitude = 0;
        const auto add = [&](double term) { sum += term, magnitude += std::abs(term); };
        for (std::size_t l = 0; l < k; ++l)
          add(static_cast<double>(decode_fp8(a_format, a.out[i * k + l])) * a.descale *
              decode_fp8(Fp8Format::e4m3, b.out[j * k + l]) * b.descale);
        if (bias) add(static_cast<float>(biases[j]));
        if (accumulate) add(static_cast<float>(before[i * n + j]));
        worst = std::max(worst, std::abs(static_cast<float>(c[i * n + j]) - sum) / magnitude);
      }
    return worst;
  }
};

TEST(Fp8Kernels, ProductsEqualSumsInDoubleToRounding) {
  for (const auto& [m, n, k] : {std::array<std::size_t, 3>{1, 16, 16}, {130, 272, 528}, {48, 16, 1024}, {5, 512, 32}})
    for (const Fp8Format format : {Fp8Format::e4m3, Fp8Format::e5m2})
      for (const bool more : {false, true}) {
        EXPECT_LT((Product<float>{format, m, n, k, more, more}.error(2)), 1e-6);
        EXPECT_LT((Product<bf16>{format, m, n, k, more, more}.error(2)), std::ldexp(1.0, -8));
        EXPECT_LT((Product<f16>{format, m, n, k, more, more}.error(2)), std::ldexp(1.0, -10));
      }
  // The control: the operands that were quantized differ by far more.
  const auto a = values_of<float>(64 * 64, 1);
  const Codes codes = quantize(a, 64);
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    worst = std::max<double>(
        worst, std::abs(decode_fp8(Fp8Format::e4m3, codes.out[i]) * codes.descale - a[i]) / std::abs(a[i]));
  EXPECT_GT(worst, 0.03);
}

TEST(Fp8Kernels, BitsForOneTwoAndThreeThreads) {
  const Product<float> product{Fp8Format::e5m2, 300, 560, 784};
  std::vector<float> one, other;
  product.error(1, &one);
  for (const std::size_t threads : {2U, 3U}) {
    product.error(threads, &other);
    EXPECT_TRUE(same_bits(one, other)) << threads;
  }
}

TEST(Fp8Kernels, RejectExtentsAndFormatsThatNoDeviceMultiplies) {
  EXPECT_THROW(check(Fp8QuantizeArgs{.rows = 3, .columns = 24}), base::InvalidUsage);
  EXPECT_THROW(check(Fp8QuantizeArgs{.columns = 16, .scaling = Fp8Scaling::delayed}), base::InvalidUsage);
  EXPECT_THROW(check(Fp8ProductArgs{.m = 1, .n = 8, .k = 16}), base::InvalidUsage);
  EXPECT_THROW(check(Fp8ProductArgs{.m = 1, .n = 16, .k = 8}), base::InvalidUsage);
  const Fp8Operand wide{.format = Fp8Format::e5m2};
  EXPECT_THROW(check(Fp8ProductArgs{.a = wide, .b = wide, .m = 1, .n = 16, .k = 16}), base::InvalidUsage);
  EXPECT_NO_THROW(check(Fp8ProductArgs{.a = wide, .m = 3, .n = 16, .k = 16}));
}

}  // namespace
}  // namespace tessera::nn::kernels
