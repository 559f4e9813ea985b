#include "tessera/base/portable_math.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>

namespace tessera::base::portable {
namespace {

// Sums, products, quotients and std::fma are rounded in one way everywhere (the compiler may not contract them);
// frexp, ldexp and nearbyint are exact.

constexpr double kLn2High = 6.93147180369123816490e-01;  // 33 bits: a product with an exponent is exact
constexpr double kLn2Low = 1.90821492927058770002e-10;   // the rest of ln(2)
constexpr double kHalfPi = std::numbers::pi / 2;
constexpr double kHalfPiLow = 6.123233995736766e-17;  // the rest of pi / 2

/// c[0] + c[1] x + ..
template <std::size_t n>
double polynomial(double x, const std::array<double, n>& c) {
  double sum = c[n - 1];
  for (std::size_t i = n - 1; i-- > 0;) sum = sum * x + c[i];
  return sum;
}

/// 1 / first!, sign / (first + step)!, 1 / (first + 2 step)!, ..
template <std::size_t n>
constexpr std::array<double, n> inverse_factorials(int first, int step, double sign) {
  std::array<double, n> c{};
  double factorial = 1;
  int at = 1;
  for (std::size_t i = 0; i < n; ++i) {
    for (; at <= first + step * static_cast<int>(i); ++at) factorial *= at;
    c[i] = (i % 2 == 1 ? sign : 1.0) / factorial;
  }
  return c;
}

/// The angle less a multiple of pi / 2, within pi / 4, and the multiple's remainder of 4.
struct Reduced {
  double angle;
  unsigned quadrant;
};
Reduced reduce(double x) {
  const double n = std::nearbyint(x / kHalfPi);
  const double angle = std::fma(-n, kHalfPiLow, std::fma(-n, kHalfPi, x));
  return {angle, static_cast<unsigned>(static_cast<std::int64_t>(n)) % 4};
}

double sine_of(double r) {
  static constexpr auto kSeries = inverse_factorials<8>(3, 2, -1.0);  // to r^17 / 17!
  const double z = r * r;
  return r - r * z * polynomial(z, kSeries);
}

double cosine_of(double r) {
  static constexpr auto kSeries = inverse_factorials<8>(4, 2, -1.0);  // to r^18 / 18!
  const double z = r * r, half = 0.5 * z, about = 1 - half;
  return about + (((1 - about) - half) + z * z * polynomial(z, kSeries));
}

double turned(double x, unsigned quarter) {
  if (!(std::abs(x) < 9.0e18)) return std::numeric_limits<double>::quiet_NaN();
  const Reduced reduced = reduce(x);
  switch ((reduced.quadrant + quarter) % 4) {
    case 0:
      return sine_of(reduced.angle);
    case 1:
      return cosine_of(reduced.angle);
    case 2:
      return -sine_of(reduced.angle);
    default:
      return -cosine_of(reduced.angle);
  }
}

}  // namespace

double log(double x) {
  if (std::isnan(x) || x < 0) return std::numeric_limits<double>::quiet_NaN();
  if (x == 0) return -std::numeric_limits<double>::infinity();
  if (std::isinf(x)) return x;
  int exponent = 0;
  double mantissa = std::frexp(x, &exponent);  // in [1/2, 1)
  if (mantissa < std::numbers::sqrt2 / 2) {
    mantissa *= 2;
    --exponent;
  }
  // log(1 + f) = 2 artanh(s), s = f / (2 + f), and f - f^2 / 2 is split off, since it is the largest part.
  static constexpr std::array<double, 11> kSeries = {2.0 / 3,  2.0 / 5,  2.0 / 7,  2.0 / 9,  2.0 / 11, 2.0 / 13,
                                                     2.0 / 15, 2.0 / 17, 2.0 / 19, 2.0 / 21, 2.0 / 23};
  const double f = mantissa - 1, s = f / (2 + f), z = s * s, half = 0.5 * f * f;
  const double rest = s * (half + z * polynomial(z, kSeries));
  const double n = exponent;
  return n * kLn2High + (f - (half - (rest + n * kLn2Low)));
}

double exp(double x) {
  if (std::isnan(x)) return x;
  if (x < -708) return 0;
  if (x > 709.78) return std::numeric_limits<double>::infinity();
  static constexpr auto kSeries = inverse_factorials<12>(2, 1, 1.0);  // to r^13 / 13!
  const double n = std::nearbyint(x * std::numbers::log2e);
  const double high = x - n * kLn2High, low = n * kLn2Low, r = high - low;
  const double correction = (high - r) - low;
  const double e = 1 + (r + (r * r * polynomial(r, kSeries) + correction));
  return std::ldexp(e, static_cast<int>(n));
}

double power(double base, double exponent) { return exp(exponent * log(base)); }

double power(double base, std::uint64_t exponent) {
  double result = 1;
  for (double square = base; exponent > 0; exponent /= 2, square *= square)
    if (exponent % 2 == 1) result *= square;
  return result;
}

double cube_root(double x) {
  if (x == 0 || !std::isfinite(x)) return x;
  const double size = std::abs(x), about = exp(log(size) / 3);
  const double root = about - (about * about * about - size) / (3 * about * about);
  return x < 0 ? -root : root;
}

double sine(double x) { return turned(x, 0); }
double cosine(double x) { return turned(x, 1); }

}  // namespace tessera::base::portable
