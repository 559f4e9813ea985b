// Points in time from durations that a program gives.
#pragma once

#include <algorithm>
#include <chrono>

namespace tessera::base {

/// The longest time that anything waits: sums of points in time and of this don't overflow.
inline constexpr std::chrono::milliseconds kLongestTime = std::chrono::hours(24 * 365 * 100);

/// The point in time `time` from now, at most kLongestTime from now: milliseconds::max() means no limit.
inline std::chrono::steady_clock::time_point deadline_after(std::chrono::milliseconds time) noexcept {
  return std::chrono::steady_clock::now() + std::clamp(time, -kLongestTime, kLongestTime);
}

}  // namespace tessera::base
