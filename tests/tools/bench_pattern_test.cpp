// The rounds of `bench --pattern`, and the rule that says what is slow.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tessera/base/error.h"
#include "tools/bench/pattern.h"

namespace tessera::tools {
namespace {

using Kind = BenchPattern::Kind;

PatternUnits hosts_of(int hosts, int ranks) {
  PatternUnits units(static_cast<std::size_t>(hosts));
  for (int r = 0; r < hosts * ranks; ++r) units[static_cast<std::size_t>(r / ranks)].push_back(r);
  return units;
}

TEST(BenchPatternRounds, TournamentHasEachPairOnce) {
  for (const int n : {2, 3, 5, 8}) {
    std::set<std::vector<int>> pairs;
    for (const auto& round : pattern_rounds({.kind = Kind::bisection}, hosts_of(n, 1))) {
      std::set<int> busy;
      for (const PatternGroup& group : round) {
        EXPECT_TRUE(pairs.insert(group.units).second);
        for (const int unit : group.units) EXPECT_TRUE(busy.insert(unit).second);
      }
      EXPECT_EQ(round.size(), static_cast<std::size_t>(n / 2));
    }
    EXPECT_EQ(pairs.size(), static_cast<std::size_t>(n * (n - 1) / 2));
  }
}

TEST(BenchPatternRounds, RanksOfTwoHostsWorkSideBySide) {
  const auto rounds = pattern_rounds({.kind = Kind::pairs}, {{0, 1}, {2, 3, 4}, {5}});
  ASSERT_EQ(rounds.size(), 3u);
  ASSERT_EQ(rounds[0].size(), 2u);
  EXPECT_EQ(rounds[0][1].ranks, (std::vector{1, 3}));
  EXPECT_EQ(rounds[1].size(), 1u) << "host 2 has one rank";
  EXPECT_EQ(pattern_rounds({.kind = Kind::incast}, {{0, 1}, {2, 3, 4}, {5}})[1].front().ranks,
            (std::vector{2, 0, 1, 5}));
  EXPECT_EQ(pattern_rounds({.kind = Kind::neighbors}, hosts_of(3, 2)).front()[1].ranks, (std::vector{1, 3, 5}));
}

TEST(BenchPatternRounds, SendsHaveTwoDirections) {
  for (const Kind kind : {Kind::pairs, Kind::bisection}) {
    std::set<std::vector<int>> links;
    for (const auto& round : pattern_rounds({.kind = kind, .sends = true}, hosts_of(4, 1)))
      for (const PatternGroup& group : round) {
        EXPECT_TRUE(links.insert(group.units).second);
        EXPECT_EQ(group.ranks, (std::vector{group.units[1], group.units[0]})) << "the receiver first";
      }
    EXPECT_EQ(links.size(), 12u);
  }
}

TEST(BenchPatternName, GroupsAreEqual) {
  EXPECT_EQ(parse_pattern("groups=2", 8).groups, 2);
  for (const char* text : {"groups=3", "groups=8", "groups=0", "groups=", "ring", "pairs=2"})
    EXPECT_THROW(parse_pattern(text, 8), base::InvalidUsage) << text;
  EXPECT_THROW(parse_pattern("pairs", 1), base::InvalidUsage);
}

/// Rates of all pairs; those of `host`, and of the link between the two of `link`, are a quarter.
std::vector<UnitRate> fabric(int n, int host, const std::vector<int>& link) {
  std::vector<UnitRate> rates;
  for (int a = 0; a < n; ++a)
    for (int b = a + 1; b < n; ++b) {
      const bool slow = a == host || b == host || std::vector{a, b} == link;
      rates.push_back({{a, b}, (slow ? 0.25 : 1) * (10 + 0.01 * ((a * 7 + b * 3) % 5))});
    }
  return rates;
}

TEST(BenchSlowParts, NamesAHostOnceAndALinkBesideIt) {
  for (const int n : {4, 5, 8}) {
    EXPECT_TRUE(slow_parts(fabric(n, -1, {}), 5).empty());
    const std::vector<SlowPart> host = slow_parts(fabric(n, 1, {}), 5);
    ASSERT_EQ(host.size(), 1u) << n;
    EXPECT_EQ(host[0].units, std::vector{1});
    EXPECT_NEAR(host[0].gbps / host[0].median_gbps, 0.25, 0.01);
  }
  const std::vector<SlowPart> link = slow_parts(fabric(4, -1, {0, 2}), 5);
  ASSERT_EQ(link.size(), 1u);
  EXPECT_EQ(link[0].units, (std::vector{0, 2}));
  const std::vector<SlowPart> both = slow_parts(fabric(8, 1, {0, 2}), 5);
  ASSERT_EQ(both.size(), 2u);
  EXPECT_EQ(both[1].units, (std::vector{0, 2}));
}

TEST(BenchSlowParts, ThresholdDecides) {
  EXPECT_TRUE(slow_parts(fabric(8, 1, {0, 2}), 25).empty()) << "the control: 25 x 0.04 is the whole median";
  EXPECT_TRUE(slow_parts(fabric(3, 1, {}), 5).empty()) << "three don't show which of them is slow";
  std::vector<UnitRate> wide;  // where rates differ much anyway, one of them is not slow
  for (int unit = 0; unit < 9; ++unit) wide.push_back({{unit}, 10.0 - unit});
  EXPECT_TRUE(slow_parts(wide, 5).empty());
  for (std::size_t i = 2; i < 8; ++i) wide[i].gbps = 9;  // and here it is
  ASSERT_EQ(slow_parts(wide, 5).size(), 1u);
}

}  // namespace
}  // namespace tessera::tools
