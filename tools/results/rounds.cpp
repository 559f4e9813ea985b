#include "tools/results/rounds.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tessera/base/error.h"
#include "tools/cli/output.h"
#include "tools/results/statistics.h"

namespace tessera::tools {
namespace {

constexpr double kCoverage = 0.95;
/// More lines than these are no overview; --json has them all.
constexpr std::size_t kPairLines = 10;

/// Probability that the interval from the k-th lowest to the k-th highest of n values holds the median: that of neither
/// fewer than k below it, nor fewer than k above it.
double coverage_of(std::size_t n, std::size_t k) {
  double outside = 0;
  double probability = std::pow(0.5, static_cast<double>(n));  // that exactly i values are below the median
  for (std::size_t i = 0; i < k; ++i) {
    outside += probability;
    probability *= static_cast<double>(n - i) / static_cast<double>(i + 1);
  }
  return 1 - 2 * outside;
}

/// Decimals that show the larger one in three digits or more.
int decimals_for(double a, double b) {
  const double most = std::max(std::abs(a), std::abs(b));
  return most >= 10 ? 1 : most >= 1 ? 2 : 3;
}

std::string verdict_of(const MedianInterval& ms) {
  if (ms.coverage < kCoverage) return "too few rounds to say";
  const int digits = decimals_for(ms.low, ms.high);
  if (ms.low <= 0 && ms.high >= 0)
    return fmt::format("no difference shown ({:+.{}f} to {:+.{}f})", ms.low, digits, ms.high, digits);
  const bool slower = ms.median > 0;
  const double near = slower ? ms.low : -ms.high;
  const double far = slower ? ms.high : -ms.low;
  return fmt::format("{} by {:.{}f} ms ({:.{}f} to {:.{}f})", slower ? "slower" : "faster", std::abs(ms.median), digits,
                     near, digits, far, digits);
}

}  // namespace

bool ends_alike(const RunResult& a, const RunResult& b) {
  return a.final_parameters_hash == b.final_parameters_hash && same_bits(a.losses, b.losses);
}

MedianInterval median_interval(std::vector<double> values) {
  if (values.empty()) throw base::InvalidUsage("median_interval: no values; give at least one");
  std::ranges::sort(values);
  const std::size_t n = values.size();
  std::size_t k = 1;
  while (2 * (k + 1) <= n && coverage_of(n, k + 1) >= kCoverage) ++k;
  return {median(values), values[k - 1], values[n - k], coverage_of(n, k)};
}

std::vector<std::size_t> round_order(std::size_t round, std::size_t runs) {
  std::vector<std::size_t> places(runs);
  std::iota(places.begin(), places.end(), std::size_t{0});
  if (runs > 0) std::rotate(places.begin(), places.begin() + static_cast<std::ptrdiff_t>(round % runs), places.end());
  return places;
}

std::vector<Difference> differences_of(const std::vector<RunResult>& runs) {
  std::vector<Difference> all;
  for (std::size_t a = 0; a < runs.size(); ++a)
    for (std::size_t b = a + 1; b < runs.size(); ++b) {
      const std::vector<double>&of_a = runs[a].round_step_ms, &of_b = runs[b].round_step_ms;
      std::vector<double> values;
      for (std::size_t i = 0; i < of_a.size(); ++i) values.push_back(of_b[i] - of_a[i]);
      const MedianInterval ms = median_interval(std::move(values));
      all.push_back({name_of(runs[a]), name_of(runs[b]), ms, verdict_of(ms)});
    }
  return all;
}

nlohmann::ordered_json to_json(const std::vector<Difference>& differences) {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const Difference& d : differences)
    json.push_back({{"a", d.a},
                    {"b", d.b},
                    {"median", d.ms.median},
                    {"low", d.ms.low},
                    {"high", d.ms.high},
                    {"coverage", d.ms.coverage},
                    {"verdict", d.verdict}});
  return json;
}

std::vector<Difference> parse_differences(const base::JsonReader& json) {
  std::vector<Difference> differences;
  for (const base::JsonReader& d : json.elements())
    differences.push_back(
        {d.at("a"), d.at("b"), {d.at("median"), d.at("low"), d.at("high"), d.at("coverage")}, d.at("verdict")});
  return differences;
}

std::string differences_text(const std::vector<Difference>& differences, std::size_t rounds) {
  if (differences.empty()) return "";
  const bool all = differences.size() <= kPairLines;
  std::string text = fmt::format("{} rounds; differences of step times within a round, with {:.1f} % intervals{}:\n",
                                 rounds, 100 * differences.front().ms.coverage, all ? "" : "; --json has all pairs");
  const auto pair = [](const Difference& d) { return d.b + " against " + d.a; };
  std::size_t width = 0;
  for (const Difference& d : differences) width = std::max(width, pair(d).size());
  for (const Difference& d : differences)
    if (all || d.a == differences.front().a) text += fmt::format("{:<{}}  {}\n", pair(d), width, d.verdict);
  return text;
}

RunResult combine_rounds(const std::vector<RunResult>& rounds) {
  RunResult all = rounds.front();
  if (rounds.size() == 1) return all;
  for (double RunResult::*figure : {&RunResult::step_ms_median, &RunResult::step_ms_p95, &RunResult::tokens_per_second,
                                    &RunResult::exposed_communication_ms})
    all.*figure = median(each_of(rounds, figure));
  std::vector<StepParts> of_rounds;
  for (std::size_t i = 0; i < rounds.size(); ++i) {
    const RunResult& round = rounds[i];
    all.round_step_ms.push_back(round.step_ms_median);
    if (!ends_alike(round, rounds.front())) all.unequal_rounds.push_back(static_cast<int>(i) + 1);
    if (round.peak_bytes.total_peak > all.peak_bytes.total_peak) all.peak_bytes = round.peak_bytes;
    if (round.parts) of_rounds.push_back(*round.parts);
    if (round.link && all.link && round.link->percent > all.link->percent) all.link = round.link;
  }
  if (!of_rounds.empty()) all.parts = mean_of(of_rounds);
  return all;
}

std::size_t median_round(const std::vector<double>& step_ms) {
  std::vector<std::size_t> order(step_ms.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, {}, [&](std::size_t round) { return step_ms[round]; });
  return order.empty() ? 0 : order[(order.size() - 1) / 2];
}

std::string unequal_rounds_text(const std::vector<RunResult>& runs) {
  std::string text;
  for (const RunResult& run : runs)
    if (!run.unequal_rounds.empty())
      text += fmt::format("{}: NOT REPEATABLE: round {} ended with other losses or parameters than round 1\n",
                          name_of(run), joined_by(run.unequal_rounds, ", "));
  return text;
}

}  // namespace tessera::tools
