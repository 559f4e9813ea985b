// Short sleeps that end in time.
#pragma once

#include <sys/prctl.h>

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

}  // namespace tessera::comm
