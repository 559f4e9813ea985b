// Benchmarks compared with earlier ones: files of `bench --json`, and which of their rows differ beyond the noise.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/bench/options.h"
#include "tools/bench/output.h"
#include "tools/bench/runner.h"

namespace tessera::tools {

/// A file that `bench --json` wrote.
struct BenchFile {
  std::string path;
  int ranks = 0;
  bool cold = false;
  bool aggregate = false;
  bool misaligned = false;
  std::string device;
  std::vector<BenchResult> results;
  nlohmann::ordered_json environment;  ///< an empty object if the file has none
  nlohmann::ordered_json json;         ///< all of it
};

/// Throws InvalidUsage that names `option` if the file can't be read; with `rows` also if it has none, or one without
/// kFewestRounds rounds.
BenchFile read_bench_file(std::string_view option, const std::string& path, bool rows = true);

/// Throws InvalidUsage.
[[noreturn]] void refuse_bench_file(std::string_view option, const std::string& path, const std::string& problem);

/// One row of both: the same backend, operation, size, dtype, memory and place.
struct RowChange {
  BenchResult before, after;
  /// How much longer the median is, as a share: 0.05 is 5 % slower.
  double slowdown() const { return after.time_us.median / before.time_us.median - 1; }
  /// Whether each round of one is slower than each of the other.
  bool beyond_noise() const;
};

/// In the order of `after`; without rows that took no time.
std::vector<RowChange> changes_of(std::span<const BenchResult> before, std::span<const BenchResult> after);

/// "all_reduce of 65536 bytes (shm, out of place): 12.30 -> 18.10 us, 47 % slower".
std::string change_text(const RowChange& change);

/// "5%", "5" or "" as 0.05. Throws InvalidUsage.
double parse_slowdown(const std::string& text);

/// Reads --baseline. Throws InvalidUsage if this run can't be compared with it.
BenchFile read_baseline(const BenchOptions& options, const BenchSpec& plan);

/// Compares with the baseline and prints a summary, except with --csv. Throws CheckFailed that names the rows
/// that are slower than --max-slowdown allows, beyond the noise.
void check_against(const BenchFile& baseline, const BenchOptions& options, const BenchReport& report);

}  // namespace tessera::tools
