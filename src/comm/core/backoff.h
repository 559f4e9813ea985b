// Polling with backoff.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "tessera/comm/base_names.h"

namespace tessera::comm {

/// Spins briefly, then yields, then sleeps for increasing times.
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
    sleep_ = std::min<std::chrono::nanoseconds>(sleep_ * 2, 500us);
    std::this_thread::sleep_for(std::min(sleep_, at_most));
  }

 private:
  int turns_ = 0;
  std::chrono::nanoseconds sleep_{5'000};
};

}  // namespace tessera::comm
