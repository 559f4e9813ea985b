#include "tessera/base/cost_table.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "tessera/base/error.h"

namespace tessera::base {

void CostTable::add(double size, double seconds) {
  if (!std::isfinite(size) || !std::isfinite(seconds) || size < 0 || seconds < 0)
    throw InvalidUsage("cost table: size " + std::to_string(size) + " and time " + std::to_string(seconds) +
                       " s must be finite and not negative");
  std::vector<double>& of_size = measured_[size];
  of_size.insert(std::upper_bound(of_size.begin(), of_size.end(), seconds), seconds);
}

void CostTable::merge(const CostTable& other) {
  for (const auto& [size, seconds] : other.measured_)
    for (const double one : seconds) add(size, one);
}

/// The medians, made non-decreasing.
std::vector<CostTable::Point> CostTable::points() const {
  std::vector<Point> all;
  for (const auto& [size, seconds] : measured_) {
    const double median = (seconds[(seconds.size() - 1) / 2] + seconds[seconds.size() / 2]) / 2;
    all.push_back({size, all.empty() ? median : std::max(median, all.back().seconds)});
  }
  return all;
}

double CostTable::at(double size) const {
  const std::vector<Point> all = points();
  if (all.empty()) return 0;
  if (all.size() == 1 || size < all.front().size)
    return all.front().size > 0 ? all.front().seconds * size / all.front().size : all.front().seconds;
  const auto above = std::upper_bound(all.begin() + 1, all.end() - 1, size,
                                      [](double value, const Point& point) { return value < point.size; });
  const Point& to = *above;
  const Point& from = *(above - 1);
  return from.seconds + (to.seconds - from.seconds) * (size - from.size) / (to.size - from.size);
}

}  // namespace tessera::base
