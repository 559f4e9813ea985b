// Polling with backoff.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "tessera/comm/base_names.h"
#include "tessera/comm/core/precise_timer.h"

namespace tessera::comm {

/// Spins briefly, then yields, then sleeps, each time for a sixteenth of the time so far, 5 to 500 us: so late, at
/// most, what is awaited is seen, beside what the kernel takes to wake the thread.
class Backoff {
 public:
  void operator()(std::chrono::nanoseconds at_most) {
    using namespace std::chrono_literals;
    if (turns_ < 200) {
      if (++turns_ >= 100) ::sched_yield();
      if (turns_ == 200) begun_ = Clock::now();
      return;
    }
    const std::chrono::nanoseconds part = (Clock::now() - begun_) / 16;
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
