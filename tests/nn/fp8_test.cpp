// The 8-bit formats against their definition in double, and against PyTorch's casts.
#include "tessera/nn/fp8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "tessera/base/dtype.h"

namespace tessera::nn {
namespace {

constexpr Fp8Format kFormats[] = {Fp8Format::e4m3, Fp8Format::e5m2};

struct Definition {
  int exponent_bits, mantissa_bits, bias;
};

Definition definition_of(Fp8Format format) {
  return format == Fp8Format::e4m3 ? Definition{4, 3, 7} : Definition{5, 2, 15};
}

/// The value of a code by the formats' definition; NaN and infinity included.
double value_of(Fp8Format format, int code) {
  const Definition d = definition_of(format);
  const int exponent = (code & 127) >> d.mantissa_bits, mantissa = code & ((1 << d.mantissa_bits) - 1);
  const double sign = code < 128 ? 1 : -1;
  const int last = (1 << d.exponent_bits) - 1;
  if (format == Fp8Format::e4m3 && exponent == last && mantissa == 7) return std::nan("");
  if (format == Fp8Format::e5m2 && exponent == last)
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - d.bias - d.mantissa_bits);
  return sign * std::ldexp((1 << d.mantissa_bits) + mantissa, exponent - d.bias - d.mantissa_bits);
}

/// The finite values of a format from zero up, by code.
std::vector<double> ladder(Fp8Format format) {
  std::vector<double> values;
  for (int code = 0; code < 128 && std::isfinite(value_of(format, code)); ++code)
    values.push_back(value_of(format, code));
  return values;
}

/// The nearest code by distance in double; the even one of two at the same distance.
int nearest(const std::vector<double>& values, double magnitude) {
  int best = 0;
  for (int code = 1; code < static_cast<int>(values.size()); ++code) {
    const double now = std::abs(values[static_cast<std::size_t>(code)] - magnitude),
                 before = std::abs(values[static_cast<std::size_t>(best)] - magnitude);
    if (now < before || (now == before && code % 2 == 0)) best = code;
  }
  return best;
}

TEST(Fp8, DecodesAll256CodesByDefinition) {
  for (const Fp8Format format : kFormats)
    for (int code = 0; code < 256; ++code) {
      const float decoded = decode_fp8(format, static_cast<std::uint8_t>(code));
      const double expected = value_of(format, code);
      if (std::isnan(expected)) {
        EXPECT_TRUE(std::isnan(decoded)) << code;
      } else {
        EXPECT_EQ(static_cast<double>(decoded), expected) << code;
        EXPECT_EQ(std::signbit(decoded), code >= 128) << code;
      }
    }
  EXPECT_EQ(ladder(Fp8Format::e4m3).back(), 448);
  EXPECT_EQ(ladder(Fp8Format::e5m2).back(), 57344);
}

TEST(Fp8, EncodesEveryCodeToItself) {
  for (const Fp8Format format : kFormats)
    for (int code = 0; code < 256; ++code) {
      const double value = value_of(format, code);
      const int encoded = encode_fp8(format, static_cast<float>(value));
      if (std::isfinite(value)) {
        EXPECT_EQ(encoded, code);
      } else {
        EXPECT_EQ(encoded & 127, 127) << code;
      }
    }
}

TEST(Fp8, RoundsToNearestEvenAroundEveryMidpoint) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const Fp8Format format : kFormats) {
    const std::vector<double> values = ladder(format);
    for (std::size_t code = 0; code + 1 < values.size(); ++code) {
      const auto middle = static_cast<float>((values[code] + values[code + 1]) / 2);
      for (const float x : {std::nextafter(middle, 0.0F), middle, std::nextafter(middle, kInfinity)}) {
        const int expected = nearest(values, x);
        EXPECT_EQ(encode_fp8(format, x), expected) << x;
        EXPECT_EQ(encode_fp8(format, -x), expected | 128) << x;
      }
      EXPECT_EQ(nearest(values, middle) % 2, 0) << "the control: a tie";
    }
  }
}

TEST(Fp8, RoundsEveryBf16ValueToNearest) {
  for (const Fp8Format format : kFormats) {
    const std::vector<double> values = ladder(format);
    for (unsigned bits = 0; bits < 0x7f80; ++bits) {
      const float x = base::bf16::to_float(static_cast<std::uint16_t>(bits));
      // It saturates: the largest is the nearest of all that is above it.
      ASSERT_EQ(encode_fp8(format, x), nearest(values, std::min<double>(x, 2 * values.back()))) << x;
    }
  }
}

TEST(Fp8, SaturatesFiniteValuesAndKeepsOthersVisible) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity(), kMost = std::numeric_limits<float>::max();
  for (const Fp8Format format : kFormats) {
    const auto largest = static_cast<float>(ladder(format).back());
    for (const float x : {std::nextafter(largest, kInfinity), 2 * largest, kMost}) {
      EXPECT_EQ(decode_fp8(format, encode_fp8(format, x)), largest) << x;
      EXPECT_EQ(decode_fp8(format, encode_fp8(format, -x)), -largest) << x;
    }
    for (const float x : {kInfinity, -kInfinity, std::nanf("")})
      EXPECT_TRUE(std::isnan(decode_fp8(format, encode_fp8(format, x)))) << x;
    EXPECT_EQ(encode_fp8(format, -0.0F), 128);
    EXPECT_EQ(encode_fp8(format, std::numeric_limits<float>::denorm_min()), 0);
  }
}

std::uint64_t fnv(const std::vector<std::uint8_t>& bytes) {
  std::uint64_t value = 0xCBF29CE484222325U;
  for (const std::uint8_t byte : bytes) value = (value ^ byte) * 0x100000001B3U;
  return value;
}

/// tests/peers/fp8.py prints the hashes of the same inputs, cast by PyTorch 2.15.
TEST(Fp8, EqualsCastsOfPyTorch) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const auto& [format, hash] :
       {std::pair(Fp8Format::e4m3, 0x43ae793a0ef87215U), std::pair(Fp8Format::e5m2, 0x7c763d4afb4c6b32U)}) {
    const std::vector<double> values = ladder(format);
    std::vector<std::uint8_t> codes;
    for (unsigned bits = 0; bits < 65536; ++bits) {
      const float x = base::bf16::to_float(static_cast<std::uint16_t>(bits));
      if (std::abs(x) <= values.back()) codes.push_back(encode_fp8(format, x));
    }
    for (std::size_t code = 0; code + 1 < values.size(); ++code) {
      const auto middle = static_cast<float>((values[code] + values[code + 1]) / 2);
      for (const float x : {std::nextafter(middle, 0.0F), middle, std::nextafter(middle, kInfinity)})
        codes.push_back(encode_fp8(format, x));
    }
    EXPECT_EQ(fnv(codes), hash);
    codes[1000] ^= 1U;
    EXPECT_NE(fnv(codes), hash) << "the control";
  }
}

TEST(Fp8, ExponentIsTheLargestThatDoesNotSaturate) {
  for (const Fp8Format format : kFormats) {
    const double largest = ladder(format).back();
    for (unsigned bits = 0x0080; bits < 0x7f80; ++bits) {
      const float amax = base::bf16::to_float(static_cast<std::uint16_t>(bits));
      const int e = fp8_exponent(format, amax);
      const double scaled = std::ldexp(static_cast<double>(amax), e);
      EXPECT_TRUE(e == -63 || scaled <= largest) << amax;
      EXPECT_TRUE(e == 63 || 2 * scaled > largest) << amax;
      ASSERT_LE(std::abs(e), 63) << amax;
    }
    for (const float amax : {0.0F, std::numeric_limits<float>::infinity(), std::nanf("")})
      EXPECT_EQ(fp8_exponent(format, amax), 0);
    EXPECT_EQ(fp8_exponent(format, std::numeric_limits<float>::denorm_min()), 63);
    EXPECT_EQ(fp8_exponent(format, static_cast<float>(largest)), 0);
    EXPECT_EQ(fp8_exponent(format, std::nextafter(static_cast<float>(largest), 1e30F)), -1);
  }
  for (int e = -126; e <= 127; ++e) EXPECT_EQ(static_cast<double>(fp8_power(e)), std::ldexp(1.0, e));
}

}  // namespace
}  // namespace tessera::nn
