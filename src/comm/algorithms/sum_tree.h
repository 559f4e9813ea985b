// The tree of slices.h, as messages: whose data meets whose, and where.
#pragma once

#include <vector>

#include "tessera/comm/slices.h"

namespace tessera::comm {

/// One end of an edge of the tree: a rank, and the ranks first .. last - 1 that it speaks for there.
struct TreeChild {
  int rank = 0;
  int first = 0;
  int last = 0;
  bool above = false;  ///< these are higher ranks than those that the parent has spoken for so far
};

/// A rank's place in the tree in which the node of ranks a .. b is kept by `root` where it is one of them, else by a.
/// With a power of two of ranks and root 0 this is the binomial tree.
struct TreePosition {
  int parent = -1;  ///< -1: this is the root
  int first = 0;    ///< this rank speaks for first .. last - 1 to its parent
  int last = 0;
  std::vector<TreeChild> children;  ///< the largest first
};
TreePosition place_in_tree(int ranks, int rank, int root);

/// The ranks as 2^levels groups of one or two neighbours: the tree's nodes at that depth, so that groups at distance 1,
/// 2, 4, ... meet exactly in its nodes. The first rank of a group speaks for it.
struct PowerOfTwoGroups {
  PowerOfTwoGroups(int ranks, int rank);

  int levels = 0;
  int group = 0;       ///< this rank's
  bool speaks = true;  ///< else it only gives its data to its partner, and gets the result from it
  int partner = -1;    ///< the other one of its group, if there is one
  int count() const { return 1 << levels; }
  /// The first rank of a group; of count(): the number of ranks.
  int first_rank(int index) const;
  /// Whom this rank exchanges with at this level, and whether those are higher ranks.
  int peer(int level) const { return first_rank(group ^ (1 << level)); }
  bool peer_above(int level) const { return ((group >> level) & 1) == 0; }
  /// The first of the groups that meet in this rank's node below `level`: 2^level groups.
  int node(int level) const { return group >> level << level; }

 private:
  int ranks_;
};

}  // namespace tessera::comm
