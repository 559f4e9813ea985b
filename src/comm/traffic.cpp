#include "tessera/comm/traffic.h"

#include "tessera/comm/slices.h"

namespace tessera::comm {

std::uint64_t TrafficStats::calls() const {
  std::uint64_t sum = 0;
  for (const TrafficCount& line : by_kind) sum += line.calls;
  return sum;
}

std::uint64_t TrafficStats::bytes_sent() const {
  std::uint64_t sum = 0;
  for (const TrafficCount& line : by_kind) sum += line.bytes_sent;
  return sum;
}

TrafficStats TrafficStats::operator-(const TrafficStats& earlier) const {
  TrafficStats difference = *this;
  for (std::size_t i = 0; i < kOpKinds; ++i) {
    difference.by_kind[i].calls -= earlier.by_kind[i].calls;
    difference.by_kind[i].bytes_sent -= earlier.by_kind[i].bytes_sent;
  }
  for (std::size_t i = 0; i < difference.bytes_to_peer.size() && i < earlier.bytes_to_peer.size(); ++i)
    difference.bytes_to_peer[i] -= earlier.bytes_to_peer[i];
  return difference;
}

std::uint64_t direct_bytes_sent(OpKind kind, std::uint64_t count, std::size_t size, int ranks, int rank, int root) {
  const auto n = static_cast<std::uint64_t>(ranks);
  switch (kind) {
    case OpKind::all_reduce: {  // the other owners read their slices from this rank, then every rank reads this rank's
                                // slice of the result
      const std::uint64_t own = slice_of(count, ranks, rank).count;
      return (count - own + own * (n - 1)) * size;
    }
    case OpKind::all_gather:
      return count / n * (n - 1) * size;
    case OpKind::reduce_scatter:
    case OpKind::all_to_all:
      return count / n * (n - 1) * size;
    case OpKind::broadcast:
      return rank == root ? count * (n - 1) * size : 0;
    case OpKind::reduce:
      return rank == root ? 0 : count * size;
    case OpKind::gather:
      return rank == root ? 0 : count / n * size;
    case OpKind::scatter:
      return rank == root ? count / n * (n - 1) * size : 0;
    case OpKind::send:
      return count * size;
    case OpKind::recv:
    case OpKind::barrier:
      return 0;
  }
  return 0;
}

std::uint64_t direct_bytes_to(OpKind kind, std::uint64_t count, std::size_t size, const Route& route) {
  if (route.peer == route.rank) return 0;
  const std::uint64_t part = count / static_cast<std::uint64_t>(route.ranks) * size;
  switch (kind) {
    case OpKind::all_reduce:
      return (slice_of(count, route.ranks, route.peer).count + slice_of(count, route.ranks, route.rank).count) * size;
    case OpKind::all_gather:
    case OpKind::reduce_scatter:
    case OpKind::all_to_all:
      return part;
    case OpKind::broadcast:
      return route.rank == route.root ? count * size : 0;
    case OpKind::reduce:
      return route.peer == route.root ? count * size : 0;
    case OpKind::gather:
      return route.peer == route.root ? part : 0;
    case OpKind::scatter:
      return route.rank == route.root ? part : 0;
    case OpKind::send:
      return route.peer == route.root ? count * size : 0;
    case OpKind::recv:
    case OpKind::barrier:
      break;
  }
  return 0;
}

}  // namespace tessera::comm
