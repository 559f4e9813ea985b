// Rounds: what their intervals hold, which differences they show, and which they don't.
#include "tools/results/rounds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "tessera/base/error.h"
#include "tools/results/comparison.h"

namespace tessera::tools {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

std::vector<double> one_to(int n) {
  std::vector<double> values(static_cast<std::size_t>(n));
  std::iota(values.begin(), values.end(), 1.0);
  return values;
}

/// The probability that the median is between the k-th lowest and the k-th highest of n values, by going through all
/// 2^n ways in which values are below or above it.
double counted_coverage(int n, int k) {
  std::uint64_t held = 0;
  for (std::uint64_t below = 0; below < std::uint64_t{1} << n; ++below) {
    const int lower = std::popcount(below);
    held += lower >= k && n - lower >= k;
  }
  return static_cast<double>(held) / static_cast<double>(std::uint64_t{1} << n);
}

TEST(MedianIntervals, HaveTheCoverageThatCountingAllCasesGives) {
  for (int n = 1; n <= 16; ++n) {
    const MedianInterval interval = median_interval(one_to(n));
    const int k = static_cast<int>(interval.low);
    EXPECT_EQ(interval.high, n + 1 - k) << n;
    EXPECT_NEAR(interval.coverage, counted_coverage(n, k), 1e-12) << n;
    EXPECT_EQ(interval.coverage >= 0.95, n >= 6) << n;
    EXPECT_TRUE(2 * (k + 1) > n || counted_coverage(n, k + 1) < 0.95) << n << ": a narrower interval would do";
  }
  EXPECT_NEAR(median_interval(one_to(6)).coverage, 0.96875, 1e-12);
  EXPECT_EQ(median_interval(one_to(9)).low, 2);
  EXPECT_NEAR(median_interval(one_to(9)).coverage, 0.961, 5e-4);
  EXPECT_EQ(median_interval({5, 1, 3}).median, 3);
  EXPECT_NE(counted_coverage(9, 3), median_interval(one_to(9)).coverage);  // the control: another rank of the values
  EXPECT_THROW(median_interval({}), base::InvalidUsage);
}

TEST(Rounds, GiveEveryRunEveryPlace) {
  EXPECT_THAT(round_order(0, 3), ElementsAre(0, 1, 2));
  EXPECT_THAT(round_order(1, 3), ElementsAre(1, 2, 0));
  EXPECT_THAT(round_order(5, 3), ElementsAre(2, 0, 1));
  EXPECT_THAT(round_order(7, 1), ElementsAre(0));
}

/// Runs with these names, which take turns.
class Runs {
 public:
  explicit Runs(const std::vector<std::string>& names) {
    for (const std::string& name : names) runs_.emplace_back().strategy = name;
  }
  /// One round: milliseconds of a step by run.
  void add(const std::vector<double>& figures) {
    for (std::size_t i = 0; i < figures.size(); ++i) runs_.at(i).round_step_ms.push_back(figures[i]);
  }
  std::vector<Difference> differences() const { return differences_of(runs_); }

 private:
  std::vector<RunResult> runs_;
};

/// Rounds of two runs on a machine whose speed changes by 10 % from round to round and by 0.5 % from run to run.
class NoisyMachine {
 public:
  explicit NoisyMachine(std::uint64_t seed) : random_(seed) {}

  /// `work`: what the second run does more, as a part.
  Difference compare(int rounds, double work) {
    Runs times({"a", "b"});
    for (int i = 0; i < rounds; ++i) {
      const double speed = noise(0.1);
      times.add({100 * speed * noise(0.005), 100 * (1 + work) * speed * noise(0.005)});
    }
    return times.differences().front();
  }
  /// The same, but every figure is of a round of its own.
  Difference compare_apart(int rounds, double work) {
    Runs times({"a", "b"});
    for (int i = 0; i < rounds; ++i)
      times.add({100 * noise(0.1) * noise(0.005), 100 * (1 + work) * noise(0.1) * noise(0.005)});
    return times.differences().front();
  }

 private:
  double noise(double part) { return std::lognormal_distribution<double>(0, part)(random_); }
  std::mt19937_64 random_;
};

template <class Compare>
int count_shown(Compare compare) {
  int shown = 0;
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    NoisyMachine machine(seed);
    const std::string verdict = compare(machine).verdict;
    shown += verdict.starts_with("slower by") || verdict.starts_with("faster by");
  }
  return shown;
}

TEST(Rounds, ShowNoDifferenceOfARunFromItself) {
  for (const int rounds : {6, 9, 12})
    EXPECT_LE(count_shown([&](NoisyMachine& machine) { return machine.compare(rounds, 0); }), 50) << rounds;
  // The control: some are shown, as the coverage promises no more.
  EXPECT_GT(count_shown([](NoisyMachine& machine) { return machine.compare(6, 0); }), 5);
}

TEST(Rounds, FindThreePercentOfWork) {
  EXPECT_GT(count_shown([](NoisyMachine& machine) { return machine.compare(6, 0.03); }), 990);
  EXPECT_GT(count_shown([](NoisyMachine& machine) { return machine.compare(6, -0.03); }), 990);
  // The control: without forming differences within a round, the machine's changes hide it.
  EXPECT_LT(count_shown([](NoisyMachine& machine) { return machine.compare_apart(6, 0.03); }), 200);
  // And five rounds never say anything.
  EXPECT_EQ(count_shown([](NoisyMachine& machine) { return machine.compare(5, 0.5); }), 0);
}

std::string verdict(const std::vector<double>& differences) {
  Runs times({"a", "b"});
  for (const double difference : differences) times.add({100, 100 + difference});
  return times.differences().front().verdict;
}

TEST(Rounds, SayWhatTheIntervalsHold) {
  EXPECT_EQ(verdict({38.2, 65.2, 48.0, 49.0, 50.0, 40.0}), "slower by 48.5 ms (38.2 to 65.2)");
  EXPECT_EQ(verdict({-38.2, -65.2, -48.0, -49.0, -50.0, -40.0}), "faster by 48.5 ms (38.2 to 65.2)");
  EXPECT_EQ(verdict({-12.2, 6.2, 1, 2, 3, 4}), "no difference shown (-12.2 to +6.2)");
  EXPECT_EQ(verdict({0, 6.2, 1, 2, 3, 4}), "no difference shown (+0.00 to +6.20)");
  EXPECT_EQ(verdict({0.25, 0.5, 0.5, 0.5, 0.5, 0.5}), "slower by 0.500 ms (0.250 to 0.500)");
  EXPECT_EQ(verdict({48, 48, 48, 48, 48}), "too few rounds to say");
}

TEST(Rounds, TextAndJsonHaveThePairs) {
  std::vector<std::string> names;
  for (int i = 0; i < 6; ++i) names.push_back("run" + std::to_string(i));
  Runs times(names);
  for (int i = 0; i < 6; ++i) times.add({1, 2, 3, 4, 5, 6});
  const std::vector<Difference> differences = times.differences();
  ASSERT_EQ(differences.size(), 15U);
  EXPECT_THAT(differences_text(differences, 6), HasSubstr("run5 against run0  slower by 5.00 ms (5.00 to 5.00)\n"));
  EXPECT_THAT(differences_text(differences, 6), testing::Not(HasSubstr("against run1")));  // too many lines
  EXPECT_THAT(differences_text(differences, 6), HasSubstr("--json has all pairs"));
  const nlohmann::json json = to_json(differences);
  const std::vector<Difference> read = parse_differences({json, "d"});
  ASSERT_EQ(read.size(), 15U);
  EXPECT_EQ(read[14].a, "run4");
  EXPECT_EQ(read[14].b, "run5");
  EXPECT_EQ(read[14].verdict, differences[14].verdict);
  EXPECT_EQ(read[14].ms.high, 1);
}

RunResult run_with(double ms, std::vector<double> losses, const std::string& hash) {
  RunResult run;
  run.strategy = "fsdp";
  run.step_ms_median = ms;
  run.losses = std::move(losses);
  run.final_parameters_hash = hash;
  return run;
}

TEST(RepeatedRuns, AreOneRunWithMedianTimes) {
  const RunResult all = combine_rounds({run_with(3, {1}, "h"), run_with(1, {1}, "h"), run_with(2, {1}, "h")});
  EXPECT_EQ(all.step_ms_median, 2);
  EXPECT_THAT(all.round_step_ms, ElementsAre(3, 1, 2));
  EXPECT_TRUE(all.unequal_rounds.empty());
  EXPECT_EQ(unequal_rounds_text({all}), "");
  EXPECT_EQ(median_round(all.round_step_ms), 2U);
  EXPECT_EQ(median_round({5, 4}), 1U);
  EXPECT_TRUE(combine_rounds({run_with(3, {1}, "h")}).round_step_ms.empty());
}

TEST(RepeatedRuns, ReportRoundsThatEndDifferently) {
  const RunResult all =
      combine_rounds({run_with(3, {1}, "h"), run_with(1, {2}, "h"), run_with(2, {1}, "h"), run_with(2, {1}, "other")});
  EXPECT_THAT(all.unequal_rounds, ElementsAre(2, 4));
  EXPECT_THAT(unequal_rounds_text({all}), StartsWith("fsdp: NOT REPEATABLE: round 2, 4 ended with other losses"));
  EXPECT_EQ(to_json(all).at("unequal_rounds").size(), 2U);
}

}  // namespace
}  // namespace tessera::tools
