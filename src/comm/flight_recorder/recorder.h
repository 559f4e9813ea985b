// Writes one rank's file of the flight recorder.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/base/file.h"
#include "tessera/base/process.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/flight_recorder/format.h"

namespace tessera::comm {

/// Shared by all communicators of a rank. Thread-safe, since different threads may use different communicators.
class FlightRecorder {
 public:
  /// Creates the file, complete on the disk. Throws InvalidUsage.
  FlightRecorder(const std::string& directory, int rank);
  /// Notes that the rank ended, and whether by an exception.
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  void set_step(std::int64_t step) noexcept { step_.store(step, std::memory_order_relaxed); }
  std::uint32_t add_communicator() noexcept { return communicators_.fetch_add(1); }
  /// Identifies a call; it stays valid when its entry is reused.
  using CallNumber = std::uint64_t;  ///< from 1
  /// Where a call is issued: the number of its communicator, and which of that one's collectives it is.
  struct Place {
    std::uint32_t communicator = 0;
    std::uint64_t sequence = 0;
    int ranks = 1;
  };
  /// Calls that have one work: one, or the parts of a batch.
  struct Calls {
    CallNumber first = 0;
    std::size_t count = 1;
  };
  /// The numbers of calls that issue() describes next.
  Calls begin(std::size_t count) noexcept { return {calls_.fetch_add(count, std::memory_order_relaxed) + 1, count}; }
  void issue(CallNumber number, const OpDesc& call, const Place& place) noexcept;
  void set_state(Calls calls, flight::State state) noexcept;
  /// Calls without a first one: the failure is that of no call.
  void fail(Calls calls, std::string_view reason) noexcept;

  /// Adds "KEY TEXT" to the lines. Never throws: a recorder must not end the run.
  void add_line(std::string_view key, std::string_view text) noexcept;

 private:
  flight::Entry& entry_of(CallNumber call) noexcept { return entries_[(call - 1) % flight::kEntries]; }

  base::UniqueFd file_;
  void* memory_ = nullptr;
  flight::Entry* entries_ = nullptr;
  const std::uint32_t made_in_ = base::count_forks();
  const int exceptions_;  // in flight when the rank began
  std::atomic<std::int64_t> step_{0};
  std::atomic<CallNumber> calls_{0};
  std::atomic<std::uint32_t> communicators_{0};
  std::atomic<int> failures_{0};
};

}  // namespace tessera::comm
