// NF4 against its definition, and the round-trip error against its bound.
#include "tessera/nn/nf4.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/nn/random.h"

namespace tessera::nn {
namespace {

/// The x below which a normally distributed number lies with probability p, by bisection.
double quantile(double p) {
  double low = -10, high = 10;
  while (high - low > 1e-15) {
    const double middle = (low + high) / 2;
    (0.5 * std::erfc(-middle / std::sqrt(2.0)) < p ? low : high) = middle;
  }
  return low;
}

/// Equal to the digits to which the published tail probability is rounded.
TEST(Nf4, LevelsAreQuantilesOfNormalDistribution) {
  const double tail = 1 - (1.0 / 30 + 1.0 / 32) / 2;
  const double most = quantile(tail);
  const auto level = [&](int k, int parts) { return quantile(tail + (0.5 - tail) * k / parts) / most; };
  for (int i = 0; i < 7; ++i) EXPECT_NEAR(kNf4Levels[static_cast<std::size_t>(i)], -level(i, 7), 3e-7);
  for (int i = 0; i <= 8; ++i) EXPECT_NEAR(kNf4Levels[static_cast<std::size_t>(15 - i)], level(i, 8), 3e-7);
}

std::vector<float> round_trip(const std::vector<float>& values) {
  std::vector<std::byte> encoded(nf4_bytes(static_cast<std::int64_t>(values.size())));
  encode_nf4(values, encoded);
  std::vector<float> out(values.size());
  decode_nf4(encoded, static_cast<std::int64_t>(values.size()), {0, static_cast<std::int64_t>(values.size())},
             out.data());
  return out;
}

std::vector<float> normal(std::size_t count, float deviation) {
  std::vector<float> values(count);
  fill_normal({"w", 1, 0, count}, 0.0F, deviation, values.data());
  return values;
}

/// Largest error in each block relative to its bound: half the largest gap between levels at the largest possible
/// scale, plus the error of the scale, for values beyond its largest level. The scale is off by at most half a step of
/// 1 / 127 of the largest deviation from the mean.
double worst(const std::vector<float>& values, double gap) {
  const std::vector<float> out = round_trip(values);
  std::vector<double> largest;
  double mean = 0;
  for (std::size_t begin = 0; begin < values.size(); begin += 64) {
    double most = 0;
    for (std::size_t i = begin; i < std::min(begin + 64, values.size()); ++i)
      most = std::max(most, std::abs(static_cast<double>(values[i])));
    largest.push_back(most);
  }
  for (const double value : largest) mean += value / static_cast<double>(largest.size());
  double ratio = 0;
  for (std::size_t block = 0; block < largest.size(); ++block) {
    double spread = 0;
    const std::size_t group = block / 256 * 256;
    for (std::size_t b = group; b < std::min(group + 256, largest.size()); ++b)
      spread = std::max(spread, std::abs(largest[b] - mean));
    const double off = spread / 254;
    const double bound = (largest[block] + off) * gap / 2 + off + 1e-6 * (largest[block] + mean);
    for (std::size_t i = block * 64; i < std::min(block * 64 + 64, values.size()); ++i)
      ratio = std::max(ratio, std::abs(static_cast<double>(out[i]) - values[i]) / bound);
  }
  return ratio;
}

TEST(Nf4, RoundTripErrorIsBounded) {
  const double gap = 1 - 0.69619280;
  for (const std::size_t count : {1, 63, 64, 65, 4096, 100003})
    for (const float deviation : {1.0F, 0.02F, 1e-6F}) {
      EXPECT_LE(worst(normal(count, deviation), gap), 1.0) << count;
    }
  std::vector<float> uneven = normal(64 * 600, 0.02F);
  for (std::size_t i = 0; i < uneven.size(); i += 1000) uneven[i] *= 50;  // outliers
  std::fill_n(uneven.begin() + 640, 64, 0.0F);
  EXPECT_LE(worst(uneven, gap), 1.0);
  EXPECT_GT(worst(normal(100003, 1.0F), gap / 2), 1.0) << "the control: half the bound is broken";
}

TEST(Nf4, LevelsAndZerosAreExact) {
  std::vector<float> values(256);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = kNf4Levels[i % 16] * 0.5F;
  EXPECT_EQ(round_trip(values), values);
  EXPECT_EQ(round_trip(std::vector<float>(130, 0.0F)), std::vector<float>(130, 0.0F));
  EXPECT_TRUE(round_trip({}).empty());
}

TEST(Nf4, RangesEqualWholeAndSizeEqualsPaper) {
  const std::vector<float> values = normal(1001, 1.0F);
  std::vector<std::byte> encoded(nf4_bytes(1001));
  encode_nf4(values, encoded);
  const std::vector<float> whole = round_trip(values);
  for (const auto& [begin, end] : {std::pair(0, 1), std::pair(63, 129), std::pair(5, 1001)}) {
    std::vector<float> part(static_cast<std::size_t>(end - begin));
    decode_nf4(encoded, 1001, {begin, end}, part.data());
    EXPECT_EQ(part, std::vector<float>(whole.begin() + begin, whole.begin() + end));
  }
  constexpr std::int64_t kCount = 64 * 256 * 10;
  EXPECT_EQ(nf4_bytes(kCount), static_cast<std::size_t>(kCount / 2 + kCount / 64 + 4 * 10 + 4));
}

TEST(Nf4, RejectsNonFiniteValues) {
  std::vector<std::byte> encoded(nf4_bytes(2));
  const float bad[] = {1.0F, std::numeric_limits<float>::quiet_NaN()};
  EXPECT_THROW(encode_nf4(bad, encoded), base::InvalidUsage);
}

}  // namespace
}  // namespace tessera::nn
