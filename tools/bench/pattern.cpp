#include "tools/bench/pattern.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tools/results/statistics.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;
using Kind = BenchPattern::Kind;
using Round = std::vector<PatternGroup>;

constexpr std::size_t kFewestJudged = 4;
constexpr double kNormal = 1.4826;        // a normal distribution's standard deviation over its median deviation
constexpr double kLeastDeviation = 0.04;  // of the median: rates of a uniform fabric may be almost equal
constexpr std::size_t kMostShown = 32;    // units of a matrix on the terminal

constexpr std::array<std::pair<const char*, Kind>, 4> kNames = {
    {{"pairs", Kind::pairs}, {"bisection", Kind::bisection}, {"neighbors", Kind::neighbors}, {"incast", Kind::incast}}};

std::size_t index(int i) { return static_cast<std::size_t>(i); }

/// A group for each position that all of these units have a rank at.
void add_groups(Round& round, const PatternUnits& units, const std::vector<int>& members) {
  std::size_t lanes = SIZE_MAX;
  for (const int unit : members) lanes = std::min(lanes, units[index(unit)].size());
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    PatternGroup group{{}, members};
    for (const int unit : members) group.ranks.push_back(units[index(unit)][lane]);
    round.push_back(std::move(group));
  }
}

/// After each round of pairs one with the other direction.
std::vector<Round> in_both_directions(const std::vector<Round>& rounds) {
  std::vector<Round> all;
  for (Round round : rounds) {
    for (PatternGroup& group : round) std::ranges::reverse(group.ranks);
    all.push_back(round);
    for (PatternGroup& group : round) {
      std::ranges::reverse(group.ranks);
      std::ranges::reverse(group.units);
    }
    all.push_back(std::move(round));
  }
  return all;
}

/// Every pair once, each round with every unit at most once: the last one stays, the others walk around the table.
std::vector<Round> tournament(const PatternUnits& units) {
  const int n = static_cast<int>(units.size()), seats = n + n % 2, walking = seats - 1;
  std::vector<Round> rounds(index(walking));
  for (int r = 0; r < walking; ++r)
    for (int i = 0; i < seats / 2; ++i) {
      const int a = i == 0 ? walking : (r + i) % walking, b = (r - i + walking) % walking;
      if (std::max(a, b) < n) add_groups(rounds[index(r)], units, {std::min(a, b), std::max(a, b)});
    }
  return rounds;
}

PatternGroup incast_to(const PatternUnits& units, int unit) {
  PatternGroup group{{units[index(unit)].front()}, {unit}};
  for (std::size_t other = 0; other < units.size(); ++other)
    if (other != index(unit)) group.ranks.insert(group.ranks.end(), units[other].begin(), units[other].end());
  return group;
}

/// Moves the slow ones of `rates` to `found`.
void take_slow(std::vector<UnitRate>& rates, double deviations, std::vector<SlowPart>& found) {
  if (rates.size() < kFewestJudged) return;
  std::vector<double> values, distances;
  for (const UnitRate& rate : rates) values.push_back(rate.gbps);
  const double middle = median(values);
  for (const double value : values) distances.push_back(std::abs(value - middle));
  const double least = middle - deviations * std::max(kNormal * median(distances), kLeastDeviation * middle);
  std::erase_if(rates, [&](const UnitRate& rate) {
    if (rate.gbps < least) found.push_back({rate.units, rate.gbps, middle});
    return rate.gbps < least;
  });
}

std::string matrix_text(const ordered_json& pattern) {
  const ordered_json& matrix = pattern.at("matrix_gbps");
  if (matrix.size() > kMostShown) return fmt::format("# The matrix of {} rows is in the JSON only\n", matrix.size());
  const auto slow = [&](std::size_t i, std::size_t j) {
    return std::ranges::any_of(pattern.at("slow"), [&](const ordered_json& part) {
      const auto units = part.at("units").get<std::vector<std::size_t>>();
      return units.size() == 1 ? units[0] == i || units[0] == j
                               : units == std::vector{i, j} || (!pattern.at("one_way") && units == std::vector{j, i});
    });
  };
  std::string text = fmt::format("# {:>4}", "");
  for (std::size_t j = 0; j < matrix.size(); ++j) text += fmt::format("  {:>8} ", j);
  for (std::size_t i = 0; i < matrix.size(); ++i) {
    text += fmt::format("\n# {:>4}", i);
    for (std::size_t j = 0; j < matrix.size(); ++j)
      text += matrix[i][j].is_null() ? fmt::format("  {:>8} ", "-")
                                     : fmt::format("  {:>8.4g}{}", matrix[i][j].get<double>(), slow(i, j) ? '*' : ' ');
  }
  return text + "\n";
}

}  // namespace

BenchPattern parse_pattern(const std::string& text, int ranks) {
  if (ranks < 2) throw base::InvalidUsage("--pattern needs two ranks or more, not --ranks 1");
  for (const auto& [name, kind] : kNames)
    if (text == name) return {text, kind, 0, false};
  constexpr std::string_view kGroups = "groups=";
  if (!text.starts_with(kGroups))
    throw base::InvalidUsage("--pattern '" + text + "'; known: pairs bisection groups=K neighbors incast");
  const auto groups =
      static_cast<int>(base::parse_integer(text.substr(kGroups.size()), "--pattern groups", 1, 1 << 20));
  if (ranks % groups != 0 || groups * 2 > ranks)
    throw base::InvalidUsage(
        fmt::format("--pattern {}: {} ranks don't make {} equal groups of two or more; use a "
                    "divisor of {}",
                    text, ranks, groups, ranks));
  return {text, Kind::groups, groups, false};
}

std::vector<Round> pattern_rounds(const BenchPattern& pattern, const PatternUnits& units) {
  const Kind kind = pattern.kind;
  std::vector<int> all(units.size());
  std::iota(all.begin(), all.end(), 0);
  std::vector<Round> rounds;
  if (kind == Kind::bisection) rounds = tournament(units);
  if (kind == Kind::neighbors || kind == Kind::groups) rounds.emplace_back();
  if (kind == Kind::neighbors) add_groups(rounds.back(), units, all);
  for (const int unit : all) {
    if (kind == Kind::groups) rounds.back().push_back({units[index(unit)], {unit}});
    if (kind == Kind::incast) rounds.push_back({incast_to(units, unit)});
    for (int other = unit + 1; kind == Kind::pairs && other < static_cast<int>(units.size()); ++other)
      add_groups(rounds.emplace_back(), units, {unit, other});
  }
  const bool directed = pattern.sends && kind != Kind::incast;
  return directed ? in_both_directions(rounds) : rounds;
}

std::vector<SlowPart> slow_parts(std::span<const UnitRate> rates, double deviations) {
  std::map<int, std::vector<double>> of_unit;
  for (const UnitRate& rate : rates)
    for (const int unit : rate.units) of_unit[unit].push_back(rate.gbps);
  std::vector<UnitRate> units, links(rates.begin(), rates.end());
  for (const auto& [unit, values] : of_unit)
    if (values.size() > 2) units.push_back({{unit}, median(values)});  // two can't tell the unit from the link
  std::vector<SlowPart> found;
  take_slow(units, deviations, found);
  std::erase_if(links, [&](const UnitRate& rate) {
    return std::ranges::any_of(found, [&](const SlowPart& part) {
      return std::ranges::find(rate.units, part.units.front()) != rate.units.end();
    });
  });
  take_slow(links, deviations, found);
  return found;
}

std::string name_of_units(const ordered_json& pattern, const ordered_json& units) {
  const auto name = [&](const ordered_json& unit) {
    return pattern.at("units").at(unit.get<std::size_t>()).at("name").get<std::string>();
  };
  if (units.size() == 1) return name(units.at(0));
  const bool one_way = pattern.at("one_way");
  return fmt::format("the link {} {} {} {}", one_way ? "from" : "between", name(units.at(0)), one_way ? "to" : "and",
                     name(units.at(1)));
}

std::string pattern_text(const ordered_json& pattern, const std::string& doubt) {
  const std::string kind = pattern.at("pattern");
  std::string text = fmt::format(
      "#\n# {}, backend {}, pattern {} over {} {}s, {} bytes, {}, redop {}: bus bandwidth in GB/s\n#\n",
      pattern.at("op").get<std::string>(), pattern.at("backend").get<std::string>(), kind, pattern.at("units").size(),
      pattern.at("unit").get<std::string>(), pattern.at("bytes").get<std::uint64_t>(),
      pattern.at("dtype").get<std::string>(), pattern.at("redop").get<std::string>());
  if (pattern.contains("matrix_gbps")) {
    text += matrix_text(pattern);
  } else {
    for (const ordered_json& rate : pattern.at("rates"))
      text += fmt::format("# {:>10.4g}  {}\n", rate.at("gbps").get<double>(), name_of_units(pattern, rate.at("units")));
  }
  std::vector<double> sums;
  for (const ordered_json& round : pattern.at("rounds")) sums.push_back(round.at("sum_gbps"));
  if (kind == "bisection" || kind.starts_with("groups"))
    text += fmt::format("# All at once : {:.4g} GB/s in sum{}\n", median(sums),
                        sums.size() > 1 ? fmt::format(", in the median of {} rounds", sums.size()) : "");
  for (const ordered_json& part : pattern.at("slow"))
    text += fmt::format("# Slow        : {}: {:.4g} GB/s, {:.2f} of the median, {:.4g}\n",
                        name_of_units(pattern, part.at("units")), part.at("gbps").get<double>(),
                        part.at("gbps").get<double>() / part.at("median_gbps").get<double>(),
                        part.at("median_gbps").get<double>());
  if (pattern.at("slow").empty())
    text += pattern.at("rates").size() < kFewestJudged
                ? "# Slow        : not judged, since fewer than four don't show it\n"
                : "# Slow        : none\n";
  if (!doubt.empty()) text += "# Doubtful    : " + doubt + "\n";
  if (!pattern.at("wrong").is_null())
    text += fmt::format("# Out of bounds values : {}\n", pattern.at("wrong").get<std::uint64_t>());
  return text;
}

}  // namespace tessera::tools
