// Where a communicator's members are in a cluster.
#pragma once

#include <vector>

#include "tessera/comm/sim/topology.h"

namespace tessera::comm::sim {

/// The places of a communicator's members. Level 0 is a rank's own port; level i is Topology::domains[i - 1]. The last
/// member represents all. `topology` must outlive it.
class Placement {
 public:
  Placement(const Topology& topology, int world, const RankSet& members);
  int ranks() const { return ranks_; }
  int levels() const { return static_cast<int>(inside_.size()); }
  /// Members in the domain of level 1, 2, ...; 1 on level 0, that of a rank itself.
  int inside(int level) const { return level == 0 ? 1 : inside_[static_cast<std::size_t>(level - 1)]; }
  /// True if members are outside of the domain.
  bool spans(int level) const { return inside(level) < ranks_; }
  /// Communicators like this one that have members in the domain.
  int communicators(int level) const;
  /// Ranks of any communicator in the domain: they do the same at the same time.
  int in_domain(int level) const { return level == 0 ? 1 : in_domain_[static_cast<std::size_t>(level - 1)]; }
  /// Seconds of latency of a message that leaves the domains up to `level`.
  double latency(int level) const;
  /// Of a message to any member.
  double latency() const;

 private:
  const Topology& topology_;
  const int ranks_;
  std::vector<int> inside_, in_domain_;
};

}  // namespace tessera::comm::sim
