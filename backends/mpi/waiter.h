// MPI has nothing to sleep on: short naps that grow while nothing happens. A collective of MPI moves only while it is
// tested, and doesn't say that it does: while one is under way, sleepers just let others have the core for a moment.
#pragma once

#include <atomic>
#include <chrono>

#include "tessera/comm/base_names.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/core/progress.h"

namespace tessera::comm::mpi {

class PollingWaiter final : public ProgressWaiter {
 public:
  PollingWaiter();
  bool arm() noexcept override;
  void sleep(std::chrono::nanoseconds at_most) noexcept override;
  void wake() noexcept override;
  /// Something moved: the next nap is a short one. Under the engine's lock.
  void stir() noexcept {
    naps_ = 0;
    driving_since_ = {};
  }
  /// Whether a collective of MPI is under way. Under the engine's lock.
  void drive(bool on) noexcept {
    driving_ = on;
    if (!on) driving_since_ = {};
  }

 private:
  UniqueFd wake_fd_;
  std::atomic<int> naps_{0};  ///< in a row
  bool driving_ = false;
  Clock::time_point driving_since_;  ///< since sleepers come
  std::atomic<bool> yields_{false};
};

}  // namespace tessera::comm::mpi
