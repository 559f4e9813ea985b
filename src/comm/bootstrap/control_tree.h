// The shape of the connections that carry the control channels: rank 0 is the root.
#pragma once

#include <vector>

#include "tessera/base/export.h"

namespace tessera::comm {

/// A star around rank 0 is the tree in which all others are its children.
struct TESSERA_API ControlTree {
  int size = 1;
  int fan_out = 1;  ///< children of a rank, at most

  bool is_star() const noexcept { return first_child(1) == size; }
  /// -1 for rank 0.
  int parent(int rank) const noexcept { return rank == 0 ? -1 : (rank - 1) / fan_out; }
  /// The children of `rank` are the ranks from here to first_child(rank + 1).
  int first_child(int rank) const noexcept;
  /// The neighbour of rank `from` that leads to another rank `to`.
  int next_hop(int from, int to) const noexcept;
  /// The ranks between the two, in order.
  std::vector<int> route(int from, int to) const;
};

}  // namespace tessera::comm
