// Measured time by size: a cost model without a formula.
#pragma once

#include <map>
#include <vector>

#include "tessera/base/export.h"

namespace tessera::plan {

/// Time by size, from measurements. Copyable; reading is thread-safe.
class TESSERA_API CostTable {
 public:
  /// Adds a measurement; of several for one size, the median is used. Throws InvalidUsage unless both values are finite
  /// and not negative.
  void add(double size, double seconds);
  /// Adds the measurements of another table.
  void merge(const CostTable& other);

  /// Interpolates linearly between the neighboring sizes. Beyond the largest size and below the smallest, the time is
  /// proportional to the size. Never decreases with the size: where measurements did, their mean is used. 0 without
  /// measurements.
  double at(double size) const;
  bool empty() const { return measured_.empty(); }  ///< true without measurements

 private:
  struct Point {
    double size = 0, seconds = 0;
  };
  std::vector<Point> points() const;
  std::map<double, std::vector<double>> measured_;  // seconds by size, sorted
};

}  // namespace tessera::plan
