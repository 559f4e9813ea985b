#include "tessera/base/portable_math.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

namespace tessera::base {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Numbers in [0, 1) that are spread evenly.
double fraction(int i) {
  const double x = i * std::numbers::phi;
  return x - std::floor(x);
}

/// The distance in units of the last place of `exact`.
double ulps(double value, long double exact) {
  int exponent = 0;
  std::frexp(exact, &exponent);
  return static_cast<double>(std::abs(static_cast<long double>(value) - exact) / std::ldexp(1.0L, exponent - 53));
}

TEST(PortableMath, IsAccurate) {
  for (int i = 1; i < 100000; ++i) {
    const double u = fraction(i);
    const double positive = std::exp((u - 0.5) * 1400), near_one = 0.7 + u;
    ASSERT_LT(ulps(portable::log(positive), std::log(static_cast<long double>(positive))), 1) << positive;
    ASSERT_LT(ulps(portable::log(near_one), std::log(static_cast<long double>(near_one))), 1) << near_one;
    const double exponent = (u - 0.5) * 1400;
    ASSERT_LT(ulps(portable::exp(exponent), std::exp(static_cast<long double>(exponent))), 1) << exponent;
    const double angle = (u - 0.5) * std::pow(10.0, i % 10);
    ASSERT_LT(ulps(portable::sine(angle), std::sin(static_cast<long double>(angle))), 2) << angle;
    ASSERT_LT(ulps(portable::cosine(angle), std::cos(static_cast<long double>(angle))), 2) << angle;
    const double any = (u - 0.5) * 1e5;
    ASSERT_LT(ulps(portable::cube_root(any), std::cbrt(static_cast<long double>(any))), 2) << any;
    ASSERT_LT(ulps(portable::power(5e5, -2 * u), std::pow(5e5L, -2.0L * u)), 64) << u;
  }
  for (const std::uint64_t n : {0, 1, 2, 10, 1000, 20000})
    EXPECT_LT(ulps(portable::power(0.999, n), std::pow(0.999L, static_cast<long double>(n))), 1 + n / 2.0) << n;
}

TEST(PortableMath, HandlesSpecialValues) {
  EXPECT_EQ(portable::log(0), -kInfinity);
  EXPECT_EQ(portable::log(1), 0);
  EXPECT_EQ(portable::log(kInfinity), kInfinity);
  EXPECT_TRUE(std::isnan(portable::log(-1)));
  EXPECT_EQ(portable::exp(0), 1);
  EXPECT_EQ(portable::exp(-kInfinity), 0);
  EXPECT_EQ(portable::exp(kInfinity), kInfinity);
  EXPECT_EQ(portable::sine(0), 0);
  EXPECT_EQ(portable::cosine(0), 1);
  EXPECT_TRUE(std::isnan(portable::sine(kInfinity)));
  EXPECT_TRUE(std::isnan(portable::cosine(std::nan(""))));
  EXPECT_EQ(portable::cube_root(-8), -2);
  EXPECT_EQ(portable::cube_root(0), 0);
}

/// These bits are everybody's: whoever sees others has a compiler that contracts or reorders operations.
TEST(PortableMath, HasTheseBits) {
  std::uint64_t hash = 0;
  const auto add = [&](double value) { hash = (hash ^ std::bit_cast<std::uint64_t>(value)) * 0x9e3779b97f4a7c15ULL; };
  for (int i = 1; i < 20000; ++i) {
    const double u = fraction(i);
    add(portable::log(u));
    add(portable::exp(50 * u));
    add(portable::sine(1e6 * u));
    add(portable::cosine(1e6 * u));
    add(portable::power(1e4, -u));
    add(portable::power(u, static_cast<std::uint64_t>(i % 97)));
    add(portable::cube_root(u));
  }
  EXPECT_EQ(hash, 0x27f66b6d39c01f77ULL) << std::hex << hash;
}

}  // namespace
}  // namespace tessera::base
