#include "tessera/comm/bootstrap/control_tree.h"

#include <algorithm>
#include <cstdint>

namespace tessera::comm {

int ControlTree::first_child(int rank) const noexcept {
  return static_cast<int>(std::min<std::int64_t>(size, std::int64_t{fan_out} * rank + 1));
}

int ControlTree::next_hop(int from, int to) const noexcept {
  while (to > from && parent(to) != from) to = parent(to);  // a parent's number is smaller
  return to > from ? to : parent(from);
}

std::vector<int> ControlTree::route(int from, int to) const {
  std::vector<int> between;
  for (int rank = from; rank != to;) {
    rank = next_hop(rank, to);
    if (rank != to) between.push_back(rank);
  }
  return between;
}

}  // namespace tessera::comm
