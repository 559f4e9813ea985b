// The median of the latest times, in memory that stays bounded.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <vector>

namespace tessera::comm {

/// Not thread-safe.
class LatestTimes {
 public:
  static constexpr std::size_t kMost = 4096;

  void add(double us) {
    us_.push_back(us);
    if (us_.size() > kMost) us_.pop_front();
  }

  /// In microseconds, of the latest kMost; the upper one of two. 0 if there are none.
  double median() const {
    if (us_.empty()) return 0;
    std::vector<double> sorted(us_.begin(), us_.end());
    const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
    std::nth_element(sorted.begin(), middle, sorted.end());
    return *middle;
  }

 private:
  std::deque<double> us_;
};

}  // namespace tessera::comm
