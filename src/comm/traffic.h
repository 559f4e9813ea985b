// Traffic counters: calls, and bytes that moved between ranks.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/types.h"

namespace tessera::comm {

/// The traffic of one rank on one communicator since its creation. The backend counts bytes where they move: sent by
/// this rank, or read by a peer from this rank's memory. Complete for every operation whose Work is done.
struct TESSERA_API TrafficStats {
  /// Counters of one kind of operation.
  struct TrafficCount {
    std::uint64_t calls = 0;       ///< operations called on this rank, completed or not
    std::uint64_t bytes_sent = 0;  ///< bytes sent by this rank, or read by a peer from its memory
    bool operator==(const TrafficCount&) const = default;  ///< compares all members
  };
  std::array<TrafficCount, kOpKinds> by_kind{};  ///< indexed by OpKind
  std::vector<std::uint64_t> bytes_to_peer;      ///< bytes by rank of the communicator; this rank's own entry is 0

  /// The counters of this kind.
  const TrafficCount& of(OpKind kind) const { return by_kind[static_cast<std::size_t>(kind)]; }
  std::uint64_t calls() const;       ///< sum over all kinds
  std::uint64_t bytes_sent() const;  ///< sum over all kinds
  /// The traffic between two snapshots of the same communicator, the later one on the left.
  TrafficStats operator-(const TrafficStats& earlier) const;
};

/// The formula bytes, independent of the code that they verify: bytes that rank `rank` of `ranks` sends in one call
/// under the `direct` algorithms. The larger buffer has `count` elements of `size` bytes. Slices of all_reduce differ
/// by at most one element, the longer ones first.
TESSERA_API std::uint64_t direct_bytes_sent(OpKind kind, std::uint64_t count, std::size_t size, int ranks, int rank,
                                            int root = 0);

/// The sender, the receiver, the number of ranks, and the root.
struct Route {
  int ranks = 1;  ///< number of ranks
  int rank = 0;   ///< the sender
  int peer = 0;   ///< the receiver
  int root = 0;   ///< root of rooted collectives
};
/// The bytes of that which go to one peer. Used if the library below can't report what it moved.
TESSERA_API std::uint64_t direct_bytes_to(OpKind kind, std::uint64_t count, std::size_t size, const Route& route);

}  // namespace tessera::comm
