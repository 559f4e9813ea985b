#include "tessera/comm/core/traffic_counters.h"

namespace tessera::comm {

void TrafficCounters::read_into(TrafficStats& stats) const {
  for (std::size_t i = 0; i < bytes_.size(); ++i) {
    const std::uint64_t bytes = bytes_[i].load(std::memory_order_relaxed);
    stats.by_kind[i % kOpKinds].bytes_sent += bytes;
    stats.bytes_to_peer[i / kOpKinds] += bytes;
  }
}

}  // namespace tessera::comm
