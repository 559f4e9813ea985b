// Why the steps of one run take longer than those of another: the gap as a sum.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tools/results/rounds.h"
#include "tools/results/step_timeline.h"

namespace tessera::tools {

/// A summand of the gap. It is positive if it makes the second run slower.
struct WhyTerm {
  std::string name;
  double ms = 0;
  MedianInterval interval;  ///< over all rounds
  /// Whether the interval leaves 0 out. Of a simulation: whether the term is more than a nanosecond.
  bool shown() const { return interval.low > 1e-6 || interval.high < -1e-6; }
};

/// The second run simulated with one thing changed.
struct WhyHelp {
  std::string change;
  double step_ms = 0;
  double gap_ms = 0;  ///< to the first run, with the links of this row
  std::uint64_t peak_bytes = 0;
};

struct Why {
  std::string from, to;
  double from_ms = 0, to_ms = 0;  ///< a step, from its batch to the end of its update
  double gap_ms = 0;              ///< to_ms - from_ms, which is the sum of the terms
  std::vector<WhyTerm> terms;     ///< in the order of the documentation
  std::size_t rounds = 1;         ///< that the means are of
  double coverage = 0;            ///< of the intervals; below 0.95 they say nothing
  std::string link;               ///< whose figures volume and latency are
  std::vector<WhyHelp> helps;     ///< the first one is without a change
};

/// The parts of both runs by round; as many rounds of each, or one. The figures are means over the middle half of the
/// rounds, by their gaps: the same rounds for all terms, so that the terms add up.
Why explain_gap(std::span<const StepParts> from, std::span<const StepParts> to);

/// {"from", "to", "gap_ms", "terms": {name: ms}, "intervals": {name: [low, high]}, "helps": [..], ..}.
nlohmann::ordered_json to_json(const Why& why);
/// Reads what to_json() wrote. Throws InvalidUsage.
Why parse_why(const base::JsonReader& json);

/// The terms as a table, and what would help.
std::string why_text(const Why& why);

/// The strategy of a run as --why names it: of "fsdp", or of "fsdp block" where several wrappings are compared.
std::string strategy_of_run(const std::string& name);

/// The strategies to run for --why: `asked`, or if those are empty, the strategies of its runs. Throws InvalidUsage
/// unless `names` are none or two.
std::vector<std::string> strategies_for_why(const std::vector<std::string>& names, std::vector<std::string> asked);

/// Their places in `runs`, the names of all runs. Throws InvalidUsage if one is not among them, or both are the same.
std::pair<std::size_t, std::size_t> find_runs(const std::vector<std::string>& names,
                                              const std::vector<std::string>& runs);

}  // namespace tessera::tools
