// MPI has nothing to sleep on: short naps that grow while nothing happens.
#pragma once

#include <atomic>
#include <chrono>

#include "backends/mpi/base.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/progress.h"

namespace tessera::mpi {

class NapSleeper final : public Sleeper {
 public:
  NapSleeper();
  bool arm() noexcept override;
  void sleep(std::chrono::nanoseconds at_most) noexcept override;
  void wake() noexcept override;
  /// Something moved: the next nap is a short one. Under the engine's lock.
  void stir() noexcept { naps_ = 0; }

 private:
  UniqueFd wake_fd_;
  std::atomic<int> naps_{0};  ///< in a row
};

}  // namespace tessera::mpi
