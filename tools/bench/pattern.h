// The patterns of `tessera bench --pattern`: which ranks run an operation at the same time, and what of a fabric is
// slow.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

namespace tessera::tools {

struct BenchPattern {
  enum class Kind : std::uint8_t { pairs, bisection, groups, neighbors, incast };
  std::string name;  ///< as given
  Kind kind = Kind::pairs;
  int groups = 0;
  /// Of pairs, bisection and incast: messages in one direction, in place of an operation.
  bool sends = false;
};

/// "pairs", "bisection", "groups=K", "neighbors" or "incast". Throws InvalidUsage.
BenchPattern parse_pattern(const std::string& text, int ranks);

/// What a pattern compares: a host with its ranks, or where there is one host, a rank; with groups=K a group.
using PatternUnits = std::vector<std::vector<int>>;

/// Ranks that run an operation together, in this order: the ranks of these units that have the same position there.
struct PatternGroup {
  std::vector<int> ranks;
  std::vector<int> units;
};

/// Rounds, one after the other; the groups of a round are disjoint and run at the same time. Groups that send begin
/// with the rank that receives, and their units with the one that sends, if it is one; pairs then have a round for each
/// direction.
std::vector<std::vector<PatternGroup>> pattern_rounds(const BenchPattern& pattern, const PatternUnits& units);

/// The bus bandwidth of one unit, or between two.
struct UnitRate {
  std::vector<int> units;
  double gbps = 0;
};

struct SlowPart {
  std::vector<int> units;  ///< one: a host, rank or group; two: a link, or its direction from the first to the second
  double gbps = 0;         ///< of a unit with several links: the median of theirs
  double median_gbps = 0;  ///< of those that it was compared with
};

/// A rate is slow if it is less than m - deviations x max(1.4826 d, 0.04 m): m is the median of the rates, d the median
/// of their distances from m. Where a unit has several rates, units are judged first, each by the median of its rates;
/// then the rates between units that are not slow. Fewer than four are not judged.
std::vector<SlowPart> slow_parts(std::span<const UnitRate> rates, double deviations);

/// "rank 1", "the link from rank 0 to rank 1": one unit or two of a pattern in the JSON, by index.
std::string name_of_units(const nlohmann::ordered_json& pattern, const nlohmann::ordered_json& units);

/// One measurement of a pattern, as in the JSON, for the terminal; lines begin with #. `doubt`: what disturbed the run.
std::string pattern_text(const nlohmann::ordered_json& pattern, const std::string& doubt);

}  // namespace tessera::tools
