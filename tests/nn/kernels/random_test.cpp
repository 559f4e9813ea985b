#include "tessera/nn/random.h"

#include <array>
#include <cmath>

#include "tests/nn/kernels/support.h"

namespace tessera::nn {
namespace {
using kernels::test::same_bits;

// Random123's known-answer file, philox4x32 with 10 rounds.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (PhiloxCounter{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  const std::uint32_t ones = 0xffffffffu;
  EXPECT_EQ(philox4x32({ones, ones, ones, ones}, {ones, ones}),
            (PhiloxCounter{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  EXPECT_EQ(philox4x32({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, {0xa4093822u, 0x299f31d0u}),
            (PhiloxCounter{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

TEST(Random, RangesHaveSameElements) {
  const RandomRange all{.name = "h.0.attn.c_attn.weight", .seed = 7, .end = 5000};
  std::vector<float> whole(5000), uniform(5000);
  fill_normal(all, 0.0f, 0.02f, whole.data());
  fill_uniform(all, -1.0f, 1.0f, uniform.data());
  for (const std::size_t begin : {0u, 1u, 3u, 4u, 1023u, 2047u})
    for (const std::size_t end : {2048u, 2049u, 4999u, 5000u}) {
      RandomRange range = all;
      range.begin = begin;
      range.end = end;
      std::vector<float> part(end - begin);
      fill_normal(range, 0.0f, 0.02f, part.data());
      EXPECT_TRUE(same_bits(
          part, std::vector<float>(whole.begin() + static_cast<long>(begin), whole.begin() + static_cast<long>(end))));
      fill_uniform(range, -1.0f, 1.0f, part.data());
      EXPECT_TRUE(same_bits(part, std::vector<float>(uniform.begin() + static_cast<long>(begin),
                                                     uniform.begin() + static_cast<long>(end))));
    }
}

TEST(Random, SeedNameAndIndexEachMatter) {
  const auto draw = [](std::string_view name, std::uint64_t seed, std::uint64_t begin) {
    std::vector<float> out(16);
    fill_normal({.name = name, .seed = seed, .begin = begin, .end = begin + 16}, 0.0f, 1.0f, out.data());
    return out;
  };
  EXPECT_TRUE(same_bits(draw("a", 1, 0), draw("a", 1, 0)));
  EXPECT_FALSE(same_bits(draw("a", 1, 0), draw("b", 1, 0)));
  EXPECT_FALSE(same_bits(draw("a", 1, 0), draw("a", 2, 0)));
  EXPECT_FALSE(same_bits(draw("a", 1, 0), draw("a", 1u + (std::uint64_t{1} << 32), 0)));
  EXPECT_FALSE(same_bits(draw("a", 1, 0), draw("a", 1, 16)));
  EXPECT_FALSE(same_bits(draw("a", 1, 0), draw("a", 1, std::uint64_t{1} << 34)));
}

double normal_below(double z) { return 0.5 * std::erfc(-z / std::sqrt(2.0)); }

// Words over the whole range: the value must be the quantile of the word's probability.
TEST(Random, NormalsAreQuantiles) {
  double worst = 0;
  for (std::uint64_t k = 0; k < 4096; ++k) {
    // dense in the middle, and down to the last words of the tail
    const std::uint64_t magnitudes[] = {k << 19, k, (std::uint64_t{1} << (k % 31)) + k % 7};
    for (const std::uint64_t magnitude : magnitudes) {
      const std::uint32_t word = static_cast<std::uint32_t>(magnitude) << 1;
      float z[2];
      const std::uint32_t both[2] = {word, word | 1u};
      normal_from_words(both, z, 2);
      EXPECT_EQ(z[0], -z[1]);
      const double v = (static_cast<double>(magnitude & 0x7fffffffu) + 0.5) * 0x1p-32;
      // P(Z > z) = v; the error in z is the error of the probability divided by the density.
      const double density = std::exp(-0.5 * z[0] * z[0]) / std::sqrt(2 * M_PI);
      worst = std::max(worst, std::abs((normal_below(-static_cast<double>(z[0])) - v) / density) /
                                  std::max(1.0, std::abs(static_cast<double>(z[0]))));
    }
  }
  EXPECT_LT(worst, 1.5e-6);
}

TEST(Random, KnownQuantiles) {
  const std::array<std::array<double, 2>, 5> table{{{0.5, 0.0},
                                                    {0.25, 0.6744897501960817},
                                                    {0.025, 1.959963984540054},
                                                    {0.001, 3.090232306167813},
                                                    {1e-6, 4.753424308822899}}};
  for (const auto& [probability, quantile] : table) {
    const auto word = static_cast<std::uint32_t>(probability * 0x1p32 - 0.5) << 1;
    float z;
    normal_from_words(&word, &z, 1);
    EXPECT_NEAR(z, quantile, 2e-4 * std::max(1e-2, quantile)) << probability;  // the word itself is rounded
  }
}

TEST(Random, MomentsOfNormalAndUniform) {
  const std::size_t n = 1 << 20;
  std::vector<float> x(n);
  fill_normal({.name = "moments", .seed = 3, .end = n}, 0.0f, 1.0f, x.data());
  double m1 = 0, m2 = 0, m3 = 0, m4 = 0;
  for (const float v : x) {
    m1 += v;
    m2 += std::pow(v, 2);
    m3 += std::pow(v, 3);
    m4 += std::pow(v, 4);
  }
  const double root = std::sqrt(static_cast<double>(n));
  EXPECT_NEAR(m1 / n, 0, 4 / root);
  EXPECT_NEAR(m2 / n, 1, 4 * std::sqrt(2.0) / root);
  EXPECT_NEAR(m3 / n, 0, 4 * std::sqrt(15.0) / root);
  EXPECT_NEAR(m4 / n, 3, 4 * std::sqrt(96.0) / root);
  fill_uniform({.name = "moments", .seed = 3, .end = n}, 0.0f, 1.0f, x.data());
  double sum = 0;
  for (const float v : x) {
    EXPECT_TRUE(v >= 0 && v < 1);
    sum += v;
  }
  EXPECT_NEAR(sum / n, 0.5, 4 * std::sqrt(1.0 / 12) / root);
}

// The values themselves, so that a compiler, vector width or machine that rounds differently is detected.
TEST(Random, BitsAreFixed) {
  std::vector<float> x(100000);
  fill_normal({.name = "fixed", .seed = 1, .end = x.size()}, 0.0f, 1.0f, x.data());
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const float v : x) {
    std::uint32_t bits;
    std::memcpy(&bits, &v, 4);
    hash = (hash ^ bits) * 0x100000001b3u;
  }
  EXPECT_EQ(hash, 0x822608e6c64db09du);
}

}  // namespace
}  // namespace tessera::nn
