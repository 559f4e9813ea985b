// Polling with backoff, and short sleeps that end in time.
#pragma once

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "tessera/comm/base_names.h"

namespace tessera::comm {

/// While it lives, the kernel wakes this thread as soon as it can, instead of 50 us later, which is the default.
class PreciseTimer {
 public:
  PreciseTimer() { ::prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL); }
  ~PreciseTimer() { ::prctl(PR_SET_TIMERSLACK, before_, 0UL, 0UL, 0UL); }
  PreciseTimer(const PreciseTimer&) = delete;
  PreciseTimer& operator=(const PreciseTimer&) = delete;

 private:
  const unsigned long before_ = static_cast<unsigned long>(::prctl(PR_GET_TIMERSLACK, 0UL, 0UL, 0UL, 0UL));
};

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
