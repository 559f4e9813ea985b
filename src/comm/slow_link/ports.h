// The ports of one rank: which of its operations occupies them, and until when.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "tessera/comm/slow_link/call_times.h"

namespace tessera::comm {

/// Ports of a rank: to ranks of its host, and to those of other hosts.
inline constexpr std::size_t kPorts = 2;

/// How an operation uses the ports of its rank.
struct PortUse {
  std::array<std::chrono::nanoseconds, kPorts> occupied{};  ///< its bytes at the rate of each
  std::chrono::nanoseconds latency{};                       ///< that follows, while the next operation uses the ports
  std::vector<int> senders;                                 ///< ranks whose data it waits for
};

/// An operation on its way.
struct Transfer {
  PortUse use;
  const CallTimes* times = nullptr;  ///< null: it begins when this rank calls it
  std::uint64_t number = 0;          ///< of the call, in `times`
  CallTimes::TimePoint called;       ///< by this rank
  CallTimes::TimePoint begun = {};   ///< set by Ports when it is known, as is `done`
  std::optional<CallTimes::TimePoint> done = {};
};

/// Every port passes one operation's bytes at a time, first come, first served. An operation comes when this rank and
/// the last of those whose data it waits for have called it, so its time depends on neither the transport below nor on
/// when anybody asks. Thread-safe.
class TESSERA_API Ports {
 public:
  void add(std::shared_ptr<Transfer> transfer);
  void remove(const Transfer& transfer);  ///< it failed, or is over
  /// When it is through; nothing while a rank has not called it.
  std::optional<CallTimes::TimePoint> done_at(const Transfer& transfer);

 private:
  void serve();

  std::mutex mutex_;
  std::vector<std::shared_ptr<Transfer>> waiting_;
  std::array<CallTimes::TimePoint, kPorts> free_{};
};

}  // namespace tessera::comm
