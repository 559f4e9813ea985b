// MPI offers no event to sleep on, so threads take short naps that grow while nothing happens. A collective of MPI
// advances only while it is tested and does not report its progress: while one is in flight, waiting threads only yield
// the core.
#pragma once

#include <atomic>
#include <chrono>

#include "tessera/comm/bootstrap.h"
#include "tessera/comm/core/progress.h"

namespace tessera::comm::mpi {

class PollingWaiter final : public ProgressWaiter {
 public:
  PollingWaiter();
  bool arm() noexcept override;
  void sleep(std::chrono::nanoseconds at_most) noexcept override;
  void wake() noexcept override;
  /// Progress was made: the next nap is short. Under the engine's lock.
  void on_progress() noexcept {
    naps_ = 0;
    waiting_since_ = {};
  }
  /// Sets whether a collective of MPI is in flight. Under the engine's lock.
  void set_collective_in_flight(bool on) noexcept {
    collective_in_flight_ = on;
    if (!on) waiting_since_ = {};
  }

 private:
  UniqueFd wake_fd_;
  std::atomic<int> naps_{0};  ///< consecutive naps
  bool collective_in_flight_ = false;
  Clock::time_point waiting_since_;  ///< since threads wait
  std::atomic<bool> yields_{false};
};

}  // namespace tessera::comm::mpi
