#include "tessera/base/dtype.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::base {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// A 16-bit float format, written from the standard and computed in double, without the bit tricks of the code under
/// test.
struct Format {
  int exponent_bits;
  int mantissa_bits;

  double value(std::uint16_t bits) const {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
    if (exponent == (1 << exponent_bits) - 1) return mantissa != 0 ? std::nan("") : sign * HUGE_VAL;
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }

  std::uint16_t infinity() const { return static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits); }

  /// Rounds to nearest, ties to even, by bisection over all values and comparison of distances in double.
  std::uint16_t nearest(double x) const {
    const auto sign = static_cast<std::uint16_t>(std::signbit(x) ? 0x8000 : 0);
    const double magnitude = std::fabs(x);
    if (std::isinf(x)) return sign | infinity();
    std::uint16_t low = 0;
    std::uint16_t high = infinity();  // stands for the next power of two, where rounding overflows
    while (high - low > 1) {
      const auto middle = static_cast<std::uint16_t>(low + (high - low) / 2);
      (value(middle) <= magnitude ? low : high) = middle;
    }
    const double below = value(low);
    const double above = high == infinity() ? 2 * below - value(static_cast<std::uint16_t>(low - 1)) : value(high);
    const double to_below = magnitude - below;
    const double to_above = above - magnitude;
    const bool up = to_above < to_below || (to_above == to_below && (low & 1) != 0);
    return sign | (up ? high : low);
  }
};

constexpr Format kHalf{5, 10};
constexpr Format kBf16{8, 7};

/// Every value of the format, the midpoint between it and its neighbor, the floats adjacent to both, and the edges of
/// float itself.
std::vector<float> hard_inputs(const Format& format) {
  std::vector<float> inputs = {kInfinity,
                               -kInfinity,
                               std::numeric_limits<float>::max(),
                               std::numeric_limits<float>::min(),
                               std::numeric_limits<float>::denorm_min(),
                               65519.996F,
                               65520.0F,
                               0.0F,
                               -0.0F};
  for (std::uint32_t bits = 0; bits < format.infinity(); ++bits) {
    const double here = format.value(static_cast<std::uint16_t>(bits));
    const double step = bits + 1 == format.infinity() ? here - format.value(static_cast<std::uint16_t>(bits - 1))
                                                      : format.value(static_cast<std::uint16_t>(bits + 1)) - here;
    for (const double at : {here, here + step / 2, here + step / 4}) {
      const auto exact = static_cast<float>(at);
      for (const float x : {exact, std::nextafter(exact, kInfinity), std::nextafter(exact, -kInfinity)}) {
        inputs.push_back(x);
        inputs.push_back(-x);
      }
    }
  }
  return inputs;
}

TEST(F16, EveryBitPatternRoundTrips) {
  for (std::uint32_t i = 0; i <= 0xffff; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float value = f16::to_float(bits);
    const double expected = kHalf.value(bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      ASSERT_EQ(f16::from_float(value), bits | 0x200) << "a NaN keeps sign and payload and becomes quiet";
      continue;
    }
    ASSERT_EQ(static_cast<double>(value), expected) << bits;
    ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << bits;
    ASSERT_EQ(f16::from_float(value), bits);
  }
}

TEST(F16, RoundsToNearestEven) {
  for (const float x : hard_inputs(kHalf)) ASSERT_EQ(f16::from_float(x), kHalf.nearest(x)) << std::hexfloat << x;
}

#ifdef __FLT16_MAX__
TEST(F16, EqualsTypeOfCompiler) {
#if defined(__aarch64__)
  using Native = __fp16;  // GCC 12 has the other name for C++ on x86 only
#else
  __extension__ using Native = _Float16;
#endif
  for (const float x : hard_inputs(kHalf))
    ASSERT_EQ(f16::from_float(x), std::bit_cast<std::uint16_t>(static_cast<Native>(x))) << std::hexfloat << x;
  for (std::uint32_t i = 0; i <= 0xffff; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const auto native = static_cast<float>(std::bit_cast<Native>(bits));
    if (std::isnan(native)) continue;
    ASSERT_EQ(std::bit_cast<std::uint32_t>(f16::to_float(bits)), std::bit_cast<std::uint32_t>(native));
  }
}
#endif

TEST(F16, DetectsTruncation) {  // negative control of the two tests above
  const auto truncated = [](float x) { return static_cast<std::uint16_t>(f16::from_float(x) - 1); };
  const float above_the_middle = std::nextafter(1.0F + 0x1p-11F, 2.0F);
  EXPECT_EQ(f16::from_float(above_the_middle), kHalf.nearest(above_the_middle));
  EXPECT_NE(truncated(above_the_middle), kHalf.nearest(above_the_middle));
}

TEST(F16, OverflowUnderflowAndTies) {
  EXPECT_EQ(f16::from_float(65504.0F), 0x7bff);
  EXPECT_EQ(f16::from_float(65519.996F), 0x7bff);
  EXPECT_EQ(f16::from_float(65520.0F), 0x7c00);
  EXPECT_EQ(f16::from_float(-65520.0F), 0xfc00);
  EXPECT_EQ(f16::from_float(0x1p-25F), 0) << "half of the smallest subnormal is a tie: to even";
  EXPECT_EQ(f16::from_float(std::nextafter(0x1p-25F, 1.0F)), 1);
  EXPECT_EQ(f16::from_float(0x1.8p-24F), 2);
  EXPECT_EQ(f16::from_float(-0.0F), 0x8000);
  static_assert(f16::from_float(1.0F) == 0x3c00, "usable at compile time");
}

TEST(BF16, EveryBitPatternRoundTrips) {
  for (std::uint32_t i = 0; i <= 0xffff; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float value = bf16::to_float(bits);
    const double expected = kBf16.value(bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      ASSERT_EQ(bf16::from_float(value), bits | 0x40);
      continue;
    }
    ASSERT_EQ(static_cast<double>(value), expected) << bits;
    ASSERT_EQ(bf16::from_float(value), bits);
  }
}

TEST(BF16, RoundsToNearestEven) {
  for (const float x : hard_inputs(kBf16)) ASSERT_EQ(bf16::from_float(x), kBf16.nearest(x)) << std::hexfloat << x;
}

TEST(BF16, NaNsWithLowPayloadStayNaN) {  // truncation of the lower half would give infinity
  for (const std::uint32_t bits : {0x7f800001U, 0xff800001U, 0x7f80ffffU, 0x7fffffffU, 0xffffffffU}) {
    const auto value = std::bit_cast<float>(bits);
    EXPECT_TRUE(std::isnan(bf16::to_float(bf16::from_float(value)))) << std::hex << bits;
    EXPECT_TRUE(std::isnan(f16::to_float(f16::from_float(value)))) << std::hex << bits;
    EXPECT_EQ(std::signbit(bf16::to_float(bf16::from_float(value))), (bits >> 31) != 0);
  }
  EXPECT_EQ(bf16::from_float(std::numeric_limits<float>::max()), 0x7f80) << "rounds up into infinity";
}

TEST(DTypeNames, RoundTripWithSizes) {
  const std::array<std::pair<const char*, std::size_t>, 12> known = {{{"f32", 4},
                                                                      {"f64", 8},
                                                                      {"f16", 2},
                                                                      {"bf16", 2},
                                                                      {"i8", 1},
                                                                      {"u8", 1},
                                                                      {"i32", 4},
                                                                      {"i64", 8},
                                                                      {"u32", 4},
                                                                      {"u64", 8},
                                                                      {"i16", 2},
                                                                      {"bool", 1}}};
  for (const auto& [name, bytes] : known) {
    EXPECT_EQ(name_of(parse_dtype(name)), name);
    EXPECT_EQ(size_of(parse_dtype(name)), bytes);
    EXPECT_EQ(is_floating(parse_dtype(name)), std::string(name).find('f') != std::string::npos);
  }
  EXPECT_EQ(dtype_of<double>, DType::f64);
  EXPECT_EQ(size_of(dtype_of<bf16>), sizeof(bf16));
}

TEST(DTypeNames, UnknownNameListsKnownNames) {
  try {
    parse_dtype("float32");
    FAIL() << "accepted";
  } catch (const InvalidUsage& error) {
    EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("'float32'"), testing::HasSubstr("bf16")));
  }
  EXPECT_THROW(parse_dtype(""), InvalidUsage);
  EXPECT_THROW(parse_dtype("F32"), InvalidUsage);
}

TEST(DTypes, AreListedInOrderWithTheirTypes) {
  for (std::size_t i = 0; i < kDTypes.size(); ++i) {
    EXPECT_EQ(kDTypes[i], static_cast<DType>(i));
    EXPECT_EQ(with_dtype(kDTypes[i], [](auto zero) { return dtype_of<decltype(zero)>; }), kDTypes[i]);
  }
}

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

TEST(AllFinite, DetectsOneNonFiniteValue) {
  for (const float odd : {kInfinity, -kInfinity, std::nanf(""), -std::nanf("")})
    for (const std::size_t at : {0, 1, 63, 999}) {
      std::vector<float> floats(1000, -0.0F);
      std::vector<double> doubles(1000, 1e308);
      std::vector<std::uint16_t> f16s(1000, 0x7bff), bf16s(1000, 0x7f7f);  // the largest finite values
      EXPECT_TRUE(all_finite(DType::f32, bytes_of(floats)));
      EXPECT_TRUE(all_finite(DType::f64, bytes_of(doubles)));
      EXPECT_TRUE(all_finite(DType::f16, bytes_of(f16s)));
      EXPECT_TRUE(all_finite(DType::bf16, bytes_of(bf16s)));
      floats[at] = odd;
      doubles[at] = odd;
      f16s[at] = f16(odd).bits;
      bf16s[at] = bf16(odd).bits;
      EXPECT_FALSE(all_finite(DType::f32, bytes_of(floats)));
      EXPECT_FALSE(all_finite(DType::f64, bytes_of(doubles)));
      EXPECT_FALSE(all_finite(DType::f16, bytes_of(f16s)));
      EXPECT_FALSE(all_finite(DType::bf16, bytes_of(bf16s)));
    }
  EXPECT_TRUE(all_finite(DType::u8, bytes_of(std::vector<std::uint32_t>{0x7f800000U})));
  EXPECT_TRUE(all_finite(DType::f32, {}));
}

}  // namespace
}  // namespace tessera::base
