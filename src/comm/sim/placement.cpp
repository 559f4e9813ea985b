#include "tessera/comm/sim/placement.h"

#include <algorithm>

namespace tessera::comm::sim {

Placement::Placement(const Topology& topology, int world, const RankSet& members)
    : topology_(topology), ranks_(members.ranks) {
  const int last = members.first + (members.ranks - 1) * members.stride;
  for (const LinkDomain& domain : topology.domains) {
    const int start = last / domain.ranks * domain.ranks;
    inside_.push_back((last - std::max(start, members.first)) / members.stride + 1);
    in_domain_.push_back(std::min(start + domain.ranks, world) - start);
  }
}

int Placement::communicators(int level) const { return std::max(1, in_domain(level) / inside(level)); }

double Placement::latency(int level) const {
  return level == 0 ? topology_.latency_s : topology_.domains[static_cast<std::size_t>(level - 1)].latency_s;
}

double Placement::latency() const {
  int outermost = 0;
  while (outermost < levels() && spans(outermost + 1)) ++outermost;
  return latency(outermost);
}

}  // namespace tessera::comm::sim
