// Selects the fastest algorithm by size from measured times: `bench --tune`.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/algorithms.h"
#include "tools/bench/runner.h"

namespace tessera::tools {

struct AlgorithmTimes {
  std::string name;
  std::map<std::uint64_t, double> us;  ///< by bytes; sizes that the algorithm refused are missing
};

/// An algorithm must be this much faster than that of the next smaller size, and still faster at the next larger size:
/// noise makes no range.
inline constexpr double kChallengerWins = 0.95;

/// Returns the ranges of one operation, from 0. The first of `times` is the initial choice. The last range is endless
/// if sizes up to kEndless were measured, since algorithms for small messages have refused by then; else it ends there,
/// and the backend chooses beyond.
inline constexpr std::uint64_t kEndless = 1 << 20;
std::vector<comm::AlgorithmRange> choose_ranges(std::span<const AlgorithmTimes> times);

/// "all_reduce=direct:0-64K;ring:64K-max", as TESSERA_ALGO has it.
std::string algorithms_text(std::string_view operation, std::span<const comm::AlgorithmRange> ranges);

/// TESSERA_ALGO's text for the algorithm with this number, from 0, of every operation that has one, of those in
/// Capabilities::algorithms; "" after the last.
std::string algorithms_of_round(const std::vector<comm::OpKind>& operations, const std::vector<std::string>& known,
                                std::size_t number);

/// Collects the runs of a backend: first with its own choice, then one for each round of algorithms.
class AlgorithmTuner {
 public:
  explicit AlgorithmTuner(const BenchSpec& plan) : plan_(plan) {}

  /// From Capabilities::algorithms.
  void set_known(const std::vector<std::string>& known) { known_ = known; }
  /// algorithms_of_round() of the plan's operations.
  std::string round(std::size_t number) const;
  /// A result of the run without an algorithm, and of a run with one.
  void add_default(const BenchResult& result);
  void add(const BenchResult& result);

  /// Times by algorithm, and the selected ranges.
  std::string table() const;
  /// The file's content. `setting` describes the measurement.
  std::string file(const std::string& setting) const;
  /// By operation: "direct:0-64K;ring:64K-max".
  nlohmann::ordered_json json() const;

 private:
  struct Operation {
    std::vector<AlgorithmTimes> times;  ///< in the backend's order
    std::map<std::uint64_t, BenchResult> by_default;
  };
  std::string table_of(const BenchOp& op, const Operation& operation) const;
  std::string text_of(const BenchOp& op) const;

  const BenchSpec& plan_;
  std::vector<std::string> known_;
  std::map<std::string, Operation, std::less<>> operations_;
};

}  // namespace tessera::tools
