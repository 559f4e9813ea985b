// Calls, and bytes that crossed between ranks.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/types.h"

namespace tessera::comm {

/// What one rank did on one communicator since it was made. Bytes are counted by the backend where they cross: sent by
/// this rank, or read by a peer from this rank's memory. Complete for every operation whose Work is done.
struct TESSERA_API TrafficStats {
  struct TrafficCount {
    std::uint64_t calls = 0;
    std::uint64_t bytes_sent = 0;
    bool operator==(const TrafficCount&) const = default;
  };
  std::array<TrafficCount, kOpKinds> by_kind{};
  std::vector<std::uint64_t> bytes_to_peer;  ///< by rank of the communicator; this rank's own entry is 0

  const TrafficCount& of(OpKind kind) const { return by_kind[static_cast<std::size_t>(kind)]; }
  std::uint64_t calls() const;
  std::uint64_t bytes_sent() const;
  /// What happened between two snapshots of the same communicator, the later one on the left.
  TrafficStats operator-(const TrafficStats& earlier) const;
};

/// The formulas, apart from the code they are compared with: bytes that rank `rank` of `ranks` sends in one call whose
/// larger buffer has `count` elements of `size` bytes, under the `direct` algorithms. Slices of all_reduce differ by at
/// most one element, the longer ones first.
TESSERA_API std::uint64_t direct_bytes_sent(OpKind kind, std::uint64_t count, std::size_t size, int ranks, int rank,
                                            int root = 0);

/// Who of how many sends to whom, and which rank is the root.
struct Route {
  int ranks = 1;
  int rank = 0;
  int peer = 0;
  int root = 0;
};
/// What of that goes to one peer. Booked where the library below can't be asked what it moved.
TESSERA_API std::uint64_t direct_bytes_to(OpKind kind, std::uint64_t count, std::size_t size, const Route& route);

}  // namespace tessera::comm
