#include "tools/bench/robust_line.h"

#include <cmath>
#include <limits>
#include <vector>

namespace tessera::tools {

std::optional<RobustLine> robust_line(std::span<const WeightedPoint> points) {
  if (points.size() < 2) return std::nullopt;
  // The best line passes two points, or one if a coefficient is 0, or none if both are.
  std::vector<RobustLine> lines = {{0, 0}};
  for (const WeightedPoint& a : points) {
    lines.push_back({a.y, 0});
    if (a.x > 0) lines.push_back({0, a.y / a.x});
    for (const WeightedPoint& b : points) {
      if (!(b.x > a.x)) continue;
      const double slope = (b.y - a.y) / (b.x - a.x);
      lines.push_back({a.y - slope * a.x, slope});
    }
  }
  RobustLine best;
  double least = std::numeric_limits<double>::infinity();
  for (const RobustLine& line : lines) {
    if (line.intercept < 0 || line.slope < 0) continue;
    double error = 0;
    for (const WeightedPoint& point : points)
      error += point.weight * std::abs(line.intercept + line.slope * point.x - point.y);
    if (error >= least) continue;
    least = error;
    best = line;
  }
  return best;
}

}  // namespace tessera::tools
