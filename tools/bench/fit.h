// Summaries of the results: fits of time = alpha + beta x bytes for each backend and operation; and the backends side
// by side.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "tools/bench/runner.h"
#include "tools/results/statistics.h"

namespace tessera::tools {

struct BackendFit {
  std::string backend;
  std::string op;
  AlphaBetaFit fit;
};

/// Fits over the medians out of place, in the order of the results; without backends and operations with too few sizes.
std::vector<BackendFit> fits_of(std::span<const BenchResult> results);
nlohmann::ordered_json to_json(const BackendFit& fit);

/// The fit of one backend and operation in a line: "1.23 us + size / 4.56 GB/s, ...". `results` contains only theirs.
std::string fit_line(std::span<const BenchResult> results);

/// Operation, size, and each backend's median out of place, with the best marked. A table whose lines start with #.
std::string side_by_side(std::span<const BenchResult> results);

}  // namespace tessera::tools
