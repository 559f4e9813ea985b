#include "tessera/comm/algorithms/sum_tree.h"

#include <bit>

namespace tessera::comm {
namespace {

int middle(int a, int b) {
  return static_cast<int>(tree_middle(static_cast<std::size_t>(a), static_cast<std::size_t>(b)));
}

}  // namespace

TreePosition place_in_tree(int ranks, int rank, int root) {
  TreePosition place;
  const auto keeper = [root](int a, int b) { return a <= root && root < b ? root : a; };
  int a = 0;
  int b = ranks;
  place.last = ranks;
  while (b - a > 1) {
    const int m = middle(a, b);
    const bool lower = rank < m;
    const int above = keeper(a, b);
    const int other_first = lower ? m : a;
    const int other_last = lower ? b : m;
    (lower ? b : a) = m;
    if (above == rank) {
      place.children.push_back({keeper(other_first, other_last), other_first, other_last, lower});
    } else if (keeper(a, b) == rank) {
      place.parent = above;
      place.first = a;
      place.last = b;
    }
  }
  return place;
}

PowerOfTwoGroups::PowerOfTwoGroups(int ranks, int rank) : ranks_(ranks) {
  levels = std::bit_width(static_cast<unsigned>(ranks)) - 1;
  int a = 0;
  int b = ranks;
  for (int level = levels - 1; level >= 0; --level) {
    const int m = middle(a, b);
    const bool upper = rank >= m;
    (upper ? a : b) = m;
    group |= (upper ? 1 : 0) << level;
  }
  speaks = rank == a;
  if (b - a == 2) partner = speaks ? a + 1 : a;
}

int PowerOfTwoGroups::first_rank(int index) const {
  if (index == count()) return ranks_;
  int a = 0;
  int b = ranks_;
  for (int level = levels - 1; level >= 0; --level) (((index >> level) & 1) != 0 ? a : b) = middle(a, b);
  return a;
}

}  // namespace tessera::comm
