// The tree of slices.h as messages: which ranks exchange data at which node.
#pragma once

#include <vector>

#include "tessera/comm/slices.h"

namespace tessera::comm {

/// One end of an edge of the tree: a rank, and the ranks first .. last - 1 whose data it sends there.
struct TreeChild {
  int rank = 0;
  int first = 0;
  int last = 0;
  bool above = false;  ///< these are higher ranks than those that the parent has covered so far
};

/// A rank's position in the tree. The node of ranks a .. b is computed by `root` if it is one of them, else by a. With
/// a power of two of ranks and root 0 this is the binomial tree.
struct TreePosition {
  int parent = -1;  ///< -1: this is the root
  int first = 0;    ///< this rank sends the sum of first .. last - 1 to its parent
  int last = 0;
  std::vector<TreeChild> children;  ///< the largest first
};
TreePosition place_in_tree(int ranks, int rank, int root);

/// Divides the ranks into 2^levels groups of one or two neighbors, the tree's nodes at that depth, so that exchanges
/// between groups at distance 1, 2, 4, ... match its nodes exactly. The first rank of a group represents it.
struct PowerOfTwoGroups {
  PowerOfTwoGroups(int ranks, int rank);

  int levels = 0;
  int group = 0;       ///< index of this rank's group
  bool speaks = true;  ///< this rank represents its group; otherwise it only sends its data to its partner and receives
                       ///< the result
  int partner = -1;    ///< the other rank of its group, or -1
  int count() const { return 1 << levels; }
  /// The first rank of a group; for count(): the number of ranks.
  int first_rank(int index) const;
  /// The rank to exchange with at this level, and whether its group has the higher ranks.
  int peer(int level) const { return first_rank(group ^ (1 << level)); }
  bool peer_above(int level) const { return ((group >> level) & 1) == 0; }
  /// The first of the 2^level groups in this rank's node below `level`.
  int node(int level) const { return group >> level << level; }

 private:
  int ranks_;
};

}  // namespace tessera::comm
