// A line through measurements of which some are wrong, because other programs used the machine.
#pragma once

#include <optional>
#include <span>

namespace tessera::tools {

struct WeightedPoint {
  double x = 0;
  double y = 0;
  double weight = 1;
};

/// y = intercept + slope * x.
struct RobustLine {
  double intercept = 0;
  double slope = 0;
};

/// The line with the least sum of weighted absolute errors, neither coefficient negative. Nothing for less than two
/// points.
std::optional<RobustLine> robust_line(std::span<const WeightedPoint> points);

}  // namespace tessera::tools
