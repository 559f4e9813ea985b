// How long something takes by its size, as it was measured: a cost model without a formula.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "tessera/base/export.h"

namespace tessera::base {

/// Copyable; reading is thread-safe.
class TESSERA_API CostTable {
 public:
  /// Several measurements of one size: their median counts. Throws InvalidUsage unless both are finite and not
  /// negative.
  void add(double size, double seconds);
  /// Adds what another one has measured.
  void merge(const CostTable& other);

  /// The straight line between the sizes next to it. Beyond the largest the slope of the last two goes on; below the
  /// smallest, and where there is one size only, it is in proportion. Never falls with the size, even if a measurement
  /// did. 0 without any.
  double at(double size) const;
  bool empty() const { return measured_.empty(); }

 private:
  struct Point {
    double size = 0, seconds = 0;
  };
  std::vector<Point> points() const;
  std::map<double, std::vector<double>> measured_;  // seconds by size, sorted
};

}  // namespace tessera::base
