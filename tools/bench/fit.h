// Fits time = alpha + beta x bytes: a backend's cost per operation and per byte.
#pragma once

#include <optional>
#include <span>

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

}  // namespace tessera::tools
