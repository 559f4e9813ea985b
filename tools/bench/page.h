// The page of `tessera bench --report`.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "tools/bench/options.h"

namespace tessera::tools {

/// What `--json` writes, with a name where a page shows several.
struct BenchRun {
  std::string name;
  nlohmann::ordered_json json;
};

/// A page with pictures of the runs, laid over each other: times and bus bandwidths over size with their bounds and
/// fits, the rates of patterns, times over a long run, verdicts and environments. Throws nlohmann's errors if a field
/// is missing or has another type.
std::string bench_page(std::span<const BenchRun> runs);

/// bench --report with files in place of operations: measures nothing. Throws InvalidUsage that names a file without
/// results.
int bench_report(const BenchOptions& options);

}  // namespace tessera::tools
