// What the single results add up to: a fit for each backend and operation, and the backends side by side.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "tools/bench/fit.h"
#include "tools/bench/runner.h"

namespace tessera::tools {

struct BackendFit {
  std::string backend;
  std::string op;
  AlphaBetaFit fit;
};

/// Over the medians out of place, in the order of the results; without those that have too few sizes.
std::vector<BackendFit> fits_of(std::span<const BenchResult> results);
nlohmann::ordered_json to_json(const BackendFit& fit);

/// The fit of one backend and operation in a line: "1.23 us + size / 4.56 GB/s, ...". `results` are theirs alone.
std::string fit_line(std::span<const BenchResult> results);

/// Operation, size, and the median of each backend out of place, the best marked. A table whose lines begin with #.
std::string side_by_side(std::span<const BenchResult> results);

}  // namespace tessera::tools
