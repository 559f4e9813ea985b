// What a backend's transport provides to the progress engine of its rank.
#pragma once

#include <chrono>

#include "tessera/base/export.h"

namespace tessera::comm {

/// The clock of all deadlines.
using Clock = std::chrono::steady_clock;

/// An object that progresses when polled.
class TESSERA_API Pollable {
 public:
  virtual ~Pollable();
  /// Does a bounded amount of work and never blocks. Called under the engine's lock. `with_health_check`: also checks
  /// deadlines and the health of the peers. True if anything progressed.
  virtual bool poll(bool with_health_check) noexcept = 0;
};

/// Lets the threads of a rank sleep if peers send messages instead of ringing its doorbell.
class TESSERA_API ProgressWaiter {
 public:
  virtual ~ProgressWaiter();
  /// Called under the engine's lock, after a poll() without progress. False: something has arrived, don't sleep.
  virtual bool arm() noexcept = 0;
  /// Returns when something arrives, if wake() was called since arm(), or after `at_most`; may also return spuriously.
  virtual void sleep(std::chrono::nanoseconds at_most) noexcept = 0;
  /// Wakes this rank's sleeping threads. Any thread.
  virtual void wake() noexcept = 0;
};

}  // namespace tessera::comm
