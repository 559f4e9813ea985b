// The bytes that one rank has sent on one communicator.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "tessera/comm/traffic.h"

namespace tessera::comm {

/// Counters by member and kind of operation. Any thread reads them; one thread at a time adds.
class TrafficCounters {
 public:
  explicit TrafficCounters(std::size_t members) : bytes_(members * kOpKinds) {}

  std::atomic<std::uint64_t>& counter(OpKind kind, int member) noexcept {
    return bytes_[static_cast<std::size_t>(member) * kOpKinds + static_cast<std::size_t>(kind)];
  }
  void add(OpKind kind, int member, std::uint64_t bytes) noexcept { add(counter(kind, member), bytes); }
  /// Adds to a counter that no other thread changes meanwhile.
  static void add(std::atomic<std::uint64_t>& counter, std::uint64_t bytes) noexcept {
    counter.store(counter.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
  }
  /// Adds the counters to `stats`.
  void read_into(TrafficStats& stats) const {
    for (std::size_t i = 0; i < bytes_.size(); ++i) {
      const std::uint64_t bytes = bytes_[i].load(std::memory_order_relaxed);
      stats.by_kind[i % kOpKinds].bytes_sent += bytes;
      stats.bytes_to_peer[i / kOpKinds] += bytes;
    }
  }

 private:
  std::vector<std::atomic<std::uint64_t>> bytes_;
};

}  // namespace tessera::comm
