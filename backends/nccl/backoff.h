// Waiting for a device that can only be polled.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace tessera::comm::nccl {

/// Polls for a moment, then yields, then sleeps for growing times.
class Backoff {
 public:
  void operator()(std::chrono::nanoseconds at_most) {
    using namespace std::chrono_literals;
    ++turns_;
    if (turns_ < 100) return;
    if (turns_ < 200) return std::this_thread::yield();
    sleep_ = std::min<std::chrono::nanoseconds>(sleep_ * 2, 500us);
    std::this_thread::sleep_for(std::min(sleep_, at_most));
  }

 private:
  int turns_ = 0;
  std::chrono::nanoseconds sleep_{5000};
};

}  // namespace tessera::comm::nccl
