// Statistics of measured values: medians, and fits of time = alpha + beta x bytes.
#pragma once

#include <optional>
#include <span>
#include <vector>

namespace tessera::tools {

/// The middle value, or the mean of the two middle ones; 0 if empty.
double median(std::vector<double> values);
/// The value that the fraction `part` (0 to 1) of the values lies below, or the nearest value; 0 if empty.
double percentile(std::vector<double> values, double part);
/// The value; a NaN, of which there are many, as the one that prints without a sign.
double unsigned_nan(double value);
/// Whether both contain the same numbers, bit for bit. All NaNs are equal: JSON can't represent their bits.
bool same_bits(const std::vector<double>& a, const std::vector<double>& b);

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
