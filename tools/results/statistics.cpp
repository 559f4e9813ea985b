#include "tools/results/statistics.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>

namespace tessera::tools {
namespace {

/// The sums of the normal equations for a/t + b s/t = 1, with sizes s in units of the largest.
struct Sums {
  double aa = 0;
  double ab = 0;
  double bb = 0;
  double a = 0;
  double b = 0;
};

struct Line {
  double alpha = 0;
  double beta = 0;
};

Line solve(const Sums& s) {
  const double determinant = s.aa * s.bb - s.ab * s.ab;
  const Line free{(s.a * s.bb - s.b * s.ab) / determinant, (s.b * s.aa - s.a * s.ab) / determinant};
  // The sum of squares is convex: if the best line has a negative coefficient, the best allowed one has a 0 there.
  if (free.alpha < 0) return {0, s.b / s.bb};
  if (free.beta < 0) return {s.a / s.aa, 0};
  return free;
}

}  // namespace

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const std::size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

double percentile(std::vector<double> values, double part) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  return values[static_cast<std::size_t>(std::lround(part * static_cast<double>(values.size() - 1)))];
}

double unsigned_nan(double value) { return std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value; }

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](double x, double y) {
    return (std::isnan(x) && std::isnan(y)) || std::bit_cast<std::uint64_t>(x) == std::bit_cast<std::uint64_t>(y);
  });
}

std::optional<AlphaBetaFit> fit_alpha_beta(std::span<const FitPoint> points) {
  std::vector<FitPoint> used;
  std::set<double> sizes;
  for (const FitPoint& point : points) {
    if (point.bytes <= 0 || point.microseconds <= 0) continue;
    used.push_back(point);
    sizes.insert(point.bytes);
  }
  if (sizes.size() < kFewestFitPoints) return std::nullopt;
  const double unit = *sizes.rbegin();
  Sums sums;
  for (const FitPoint& point : used) {
    const double a = 1 / point.microseconds;
    const double b = point.bytes / unit / point.microseconds;
    sums.aa += a * a;
    sums.ab += a * b;
    sums.bb += b * b;
    sums.a += a;
    sums.b += b;
  }
  const Line line = solve(sums);
  AlphaBetaFit fit{.alpha_us = line.alpha,
                   .beta_us_per_byte = line.beta / unit,
                   .points = static_cast<int>(sizes.size()),
                   .span = unit / *sizes.begin()};
  std::vector<double> errors;
  for (const FitPoint& point : used) errors.push_back(std::abs(fit.microseconds(point.bytes) / point.microseconds - 1));
  fit.median_error = median(errors);
  fit.worst_error = *std::ranges::max_element(errors);
  return fit;
}

}  // namespace tessera::tools
