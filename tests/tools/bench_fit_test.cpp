// The fit against data from known coefficients; data that no line fits; and the fit of absolute errors as a control.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tools/results/statistics.h"

namespace tessera::tools {
namespace {

/// alpha + beta s at 8 B .. 128 MiB, each off by `noise` up or down.
std::vector<FitPoint> points_of(double alpha, double beta, double noise) {
  std::vector<FitPoint> points;
  for (int power = 3; power <= 27; power += 2) {
    const double bytes = std::pow(2.0, power);
    const double sign = (power * 7919 % 13) % 2 == 0 ? 1 : -1;
    points.push_back({bytes, (alpha + beta * bytes) * (1 + sign * noise)});
  }
  return points;
}

/// Control: alpha from least squares of absolute errors.
double alpha_of_absolute_errors(const std::vector<FitPoint>& points) {
  double n = 0, s = 0, ss = 0, t = 0, st = 0;
  for (const FitPoint& p : points) {
    n += 1;
    s += p.bytes;
    ss += p.bytes * p.bytes;
    t += p.microseconds;
    st += p.bytes * p.microseconds;
  }
  return (t * ss - st * s) / (n * ss - s * s);
}

TEST(BenchFit, ExactDataRecoverCoefficients) {
  const auto fit = fit_alpha_beta(points_of(3, 2e-4, 0));
  ASSERT_TRUE(fit);
  EXPECT_NEAR(fit->alpha_us, 3, 1e-9);
  EXPECT_NEAR(fit->beta_us_per_byte, 2e-4, 1e-14);
  EXPECT_LT(fit->worst_error, 1e-9);
  EXPECT_EQ(fit->points, 13);
  EXPECT_EQ(fit->span, std::pow(2.0, 24));
}

TEST(BenchFit, NoiseOfLargeSizesDoesNotHideSmallOnes) {
  const std::vector<FitPoint> points = points_of(3, 2e-4, 0.05);
  const auto fit = fit_alpha_beta(points);
  ASSERT_TRUE(fit);
  EXPECT_NEAR(fit->alpha_us, 3, 0.15);
  EXPECT_NEAR(fit->beta_us_per_byte, 2e-4, 1e-5);
  EXPECT_LT(fit->median_error, 0.08);
  EXPECT_LT(fit->worst_error, 0.11);
  EXPECT_GT(std::abs(alpha_of_absolute_errors(points) - 3), 30) << "control: this one must drown";
}

TEST(BenchFit, NonlinearDataHaveLargeError) {
  std::vector<FitPoint> points = points_of(3, 2e-4, 0);
  for (FitPoint& p : points)
    if (p.bytes > 1 << 20) p.microseconds *= 3;  // too large for the cache
  const auto fit = fit_alpha_beta(points);
  ASSERT_TRUE(fit);
  EXPECT_GT(fit->worst_error, 0.3);
  for (const FitPoint& p : points) {
    const double off = std::abs(fit->microseconds(p.bytes) / p.microseconds - 1);
    EXPECT_LE(off, fit->worst_error * (1 + 1e-12));
  }
}

TEST(BenchFit, NoCoefficientIsNegative) {
  std::vector<FitPoint> steep, falling;
  for (const double bytes : {1e3, 1e4, 1e5, 1e6}) {
    steep.push_back({bytes, bytes * bytes * 1e-6});
    falling.push_back({bytes, 100 / bytes});
  }
  EXPECT_EQ(fit_alpha_beta(steep)->alpha_us, 0);
  EXPECT_GT(fit_alpha_beta(steep)->beta_us_per_byte, 0);
  EXPECT_EQ(fit_alpha_beta(falling)->beta_us_per_byte, 0);
  EXPECT_GT(fit_alpha_beta(falling)->alpha_us, 0);
}

TEST(BenchFit, TooFewSizesHaveNoFit) {
  EXPECT_FALSE(fit_alpha_beta({}));
  const std::vector<FitPoint> two = {{0, 5}, {8, 1}, {8, 2}, {16, 2}};
  EXPECT_FALSE(fit_alpha_beta(two)) << "0 bytes and repeats are no sizes";
  const std::vector<FitPoint> three = {{8, 1}, {16, 2}, {32, 4}};
  EXPECT_TRUE(fit_alpha_beta(three));
}

}  // namespace
}  // namespace tessera::tools
