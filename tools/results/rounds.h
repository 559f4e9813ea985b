// Runs that are repeated in rounds: which differences of their times are more than noise, and one result of all rounds.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/base/json/json_reader.h"
#include "tools/results/run_result.h"

namespace tessera::tools {

/// Where the median of a distribution lies, told from values drawn from it.
struct MedianInterval {
  double median = 0;    ///< of the values
  double low = 0;       ///< one of the values
  double high = 0;      ///< likewise, as far from the highest as `low` is from the lowest
  double coverage = 0;  ///< probability that such an interval holds the distribution's median, whatever its shape
};

/// The narrowest such interval that holds the median with 95 % or more. Fewer than six values can't: theirs is from the
/// lowest to the highest. Throws InvalidUsage without values.
MedianInterval median_interval(std::vector<double> values);

/// How much longer the steps of `b` take than those of `a`.
struct Difference {
  std::string a, b;
  MedianInterval ms;
  /// "slower by 48.5 ms (38.2 to 65.2)": `b` is. Or "no difference shown (-12.2 to +6.2)", where the interval holds 0,
  /// or "too few rounds to say".
  std::string verdict;
};

/// The order of the runs in a round, from 0: every run has every place in turn.
std::vector<std::size_t> round_order(std::size_t round, std::size_t runs);

/// Of all pairs of runs that took turns. What slows down the machine for a while slows down all runs of a round, so it
/// is in no difference that is formed within a round.
std::vector<Difference> differences_of(const std::vector<RunResult>& runs);

/// "[{"a", "b", "median", "low", "high", "coverage", "verdict"}, ..]".
nlohmann::ordered_json to_json(const std::vector<Difference>& differences);
/// Reads what to_json() wrote. Throws InvalidUsage.
std::vector<Difference> parse_differences(const base::JsonReader& json);

/// A line for each pair, in the order of the runs; of many pairs only those with the first run.
std::string differences_text(const std::vector<Difference>& differences, std::size_t rounds);

/// Whether both have the same final parameters and the same losses, bit for bit.
bool ends_alike(const RunResult& a, const RunResult& b);

/// Times are medians over the rounds; bytes, calls and memory are those of the first round, or the highest peak. Needs
/// a round or more.
RunResult combine_rounds(const std::vector<RunResult>& rounds);

/// Which of the rounds, from 0, has the median time; of two, the first.
std::size_t median_round(const std::vector<double>& step_ms);

/// A line for each run whose rounds ended with different losses or parameters; "" if there is none.
std::string unequal_rounds_text(const std::vector<RunResult>& runs);

}  // namespace tessera::tools
