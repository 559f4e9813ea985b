// Summaries of the results: fits of time = alpha + beta x bytes, a backend's cost per operation and per byte; and the
// backends side by side.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/bench/runner.h"

namespace tessera::tools {

struct FitPoint {
  double bytes = 0;
  double microseconds = 0;
};

/// Errors are relative to the measured time: |fitted / measured - 1|.
struct AlphaBetaFit {
  double alpha_us = 0;
  double beta_us_per_byte = 0;
  double median_error = 0;
  double worst_error = 0;
  int points = 0;   ///< distinct sizes
  double span = 1;  ///< largest size / smallest
  double microseconds(double bytes) const { return alpha_us + beta_us_per_byte * bytes; }
};

inline constexpr int kFewestFitPoints = 3;  ///< a line goes through any two

/// Returns the line with the least sum of squared relative errors and no negative coefficient. Ignores points without
/// bytes or time; returns nothing if fewer than kFewestFitPoints sizes remain.
std::optional<AlphaBetaFit> fit_alpha_beta(std::span<const FitPoint> points);

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
