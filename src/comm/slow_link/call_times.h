// The times at which a communicator's ranks called its collectives, in memory that they share.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <span>

#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// Each rank writes its own times and reads those of all. The memory has no name, so nothing is left behind by a rank
/// that is killed. Ranks on several hosts share none; each then knows its own times only.
class CallTimes {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  /// Collective over `communicator`, which is used in the constructor only.
  explicit CallTimes(Communicator& communicator);
  ~CallTimes();
  CallTimes(const CallTimes&) = delete;
  CallTimes& operator=(const CallTimes&) = delete;

  bool shared() const noexcept { return times_ != nullptr; }  ///< the same on every rank
  /// This rank calls collective number `call`, from 0.
  void record(std::uint64_t call, TimePoint time) noexcept;
  /// When the last of these ranks called it; nothing: one of them has not called yet. Calls that are many calls behind
  /// a rank's last one are not counted.
  std::optional<TimePoint> last(std::uint64_t call, std::span<const int> ranks) const noexcept;

 private:
  struct Header;
  std::atomic<std::uint64_t>& entry(int rank, std::uint64_t call) const noexcept;
  void attach(Communicator& communicator);

  const int rank_;
  void* memory_ = nullptr;
  const std::size_t bytes_;
  std::atomic<std::uint64_t>* times_ = nullptr;
};

}  // namespace tessera::comm
