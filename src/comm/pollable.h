// What a backend's transport gives to the progress engine of its rank.
#pragma once

#include <chrono>

#include "tessera/base/export.h"

namespace tessera::comm {

/// The clock of deadlines.
using Clock = std::chrono::steady_clock;

/// Something that moves when polled.
class TESSERA_API Pollable {
 public:
  virtual ~Pollable();
  /// Called under the engine's lock. Does a bounded piece of work and never blocks. `with_health_check`: also look at
  /// deadlines and at the health of the peers. True if anything moved.
  virtual bool poll(bool with_health_check) noexcept = 0;
};

/// How threads of a rank sleep where peers don't ring its doorbell: they send something instead.
class TESSERA_API ProgressWaiter {
 public:
  virtual ~ProgressWaiter();
  /// Under the engine's lock, after a poll() that moved nothing. False: something has come meanwhile, don't sleep.
  virtual bool arm() noexcept = 0;
  /// Returns when something has come, when wake() was called since arm(), or after `at_most`; also without a reason.
  virtual void sleep(std::chrono::nanoseconds at_most) noexcept = 0;
  /// Ends the sleeps of this rank's threads. Any thread.
  virtual void wake() noexcept = 0;
};

}  // namespace tessera::comm
