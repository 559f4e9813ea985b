// Polling with backoff.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "tessera/comm/base_names.h"
#include "tessera/comm/core/precise_timer.h"

namespace tessera::comm {

/// Spins briefly, then yields, then sleeps, each time for a sixteenth of the time so far: what is awaited is seen at
/// most that much later than it happens.
class Backoff {
 public:
  void operator()(std::chrono::nanoseconds at_most) {
    using namespace std::chrono_literals;
    ++turns_;
    if (turns_ < 100) return;
    if (turns_ < 200) {
      ::sched_yield();
      return;
    }
    const Clock::time_point now = Clock::now();
    if (turns_ == 200) begun_ = now;
    const std::chrono::nanoseconds part = (now - begun_) / 16;
    const PreciseTimer timer;
    std::this_thread::sleep_for(std::min(std::clamp<std::chrono::nanoseconds>(part, 5us, 500us), at_most));
  }

  /// The next turn is the first again.
  void reset() { turns_ = 0; }

 private:
  using Clock = std::chrono::steady_clock;

  int turns_ = 0;
  Clock::time_point begun_;  // of the sleeps
};

}  // namespace tessera::comm
