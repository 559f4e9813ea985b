// The host events that a device's streams have yet to pass.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/base/stream.h"

namespace tessera::base {

/// A stream that waits for the host can block the host, too. A call that synchronizes the device (freeing memory,
/// loading code at a kernel's first launch), and a launch into a full queue, hold the vendor's lock until the stream
/// goes on, and the thread that should set the event may need that lock for a copy. Before such a call the host
/// therefore waits here, which calls nothing of the vendor's. The wait ends because the owner of the event sets it,
/// also after a failure or a time-out. Thread-safe.
class TESSERA_API HostWaits {
 public:
  /// Pieces of work that may be appended behind an event that is not set: fewer than a device's launch queue holds.
  static constexpr std::size_t kMaxRunAhead = 512;

  /// A stream of the device will wait for `event`, which the host sets.
  void add(Event event);
  /// Returns once all events added so far are set. Must not be called by a thread that is to set one of them.
  void wait_all();
  /// Work is about to be appended to a stream. Waits as wait_all() if too much of it is behind an event.
  void count_work();

 private:
  std::mutex mutex_;
  std::vector<Event> unset_;            ///< guarded by mutex_
  std::atomic<bool> any_{false};        ///< unset_ is not empty
  std::atomic<std::size_t> behind_{0};  ///< pieces of work since the oldest of them
};

}  // namespace tessera::base
