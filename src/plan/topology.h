// The network of a cluster: hosts, racks and pods, the links that lead out of them, and what the collective algorithms
// cost on them.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/algorithms.h"
#include "tessera/plan/network.h"

namespace tessera::plan {

/// Consecutive ranks that share a link to all others: a host, a rack of hosts, a pod of racks.
struct LinkDomain {
  int ranks = 1;                ///< a multiple of the inner domain's
  double bytes_per_second = 0;  ///< bandwidth of the link out of the domain, in each direction
  double latency_s = 0;         ///< latency of a message that leaves it, in seconds
};

/// The places of a cluster's ranks, and the links between them.
struct Topology {
  double bytes_per_second = 0;      ///< bandwidth of a rank's port inside its host, in each direction
  double latency_s = 0;             ///< latency of a message inside a host, in seconds
  std::vector<LinkDomain> domains;  ///< domains, the host first; all equally many ranks, or fewer in the last one
  LinkSharing sharing = LinkSharing::fair;  ///< see Network::sharing
  /// True: an operation of a communicator starts when the previous one is done.
  bool in_order = true;
  /// Algorithm of each operation and size. Entries of TESSERA_ALGO, "vendor" for the choice of a GPU vendor's library
  /// (rings, or for all_reduce a double binary tree where that is faster), and "hierarchical" for one inside the hosts
  /// and one between. Operations without an entry take what the library chooses on transports without collectives.
  comm::AlgorithmTable algorithms;
};

/// The places of a communicator's members in a cluster. Level 0 is a rank's own port; level i is Topology::domains[i -
/// 1]. The last member represents all. `topology` must outlive it.
class Placement {
 public:
  /// The places of `members` in a cluster of `world` ranks.
  Placement(const Topology& topology, int world, const RankSet& members);
  int ranks() const { return ranks_; }                             ///< members
  int levels() const { return static_cast<int>(inside_.size()); }  ///< domains around a rank
  /// Members in the domain of level 1, 2, ...; 1 on level 0, that of a rank itself.
  int inside(int level) const { return level == 0 ? 1 : inside_[static_cast<std::size_t>(level - 1)]; }
  /// True if members are outside of the domain.
  bool spans(int level) const { return inside(level) < ranks_; }
  /// Communicators like this one that have members in the domain.
  int communicators(int level) const { return std::max(1, in_domain(level) / inside(level)); }
  /// Ranks of any communicator in the domain: they do the same at the same time.
  int in_domain(int level) const { return level == 0 ? 1 : in_domain_[static_cast<std::size_t>(level - 1)]; }
  /// Seconds of latency of a message that leaves the domains up to `level`.
  double latency(int level) const {
    return level == 0 ? topology_.latency_s : topology_.domains[static_cast<std::size_t>(level - 1)].latency_s;
  }
  /// Seconds of latency of a message to any member.
  double latency() const {
    int outermost = 0;
    while (outermost < levels() && spans(outermost + 1)) ++outermost;
    return latency(outermost);
  }

 private:
  const Topology& topology_;
  const int ranks_;
  std::vector<int> inside_, in_domain_;
};

/// "all_reduce=vendor", ...: every entry that Topology::algorithms may have, in the spelling of TESSERA_ALGO.
TESSERA_API std::vector<std::string> simulated_algorithms();

/// The network of `ranks` equal ranks: each link carries what all ranks that share it send when they do the same.
/// Throws InvalidUsage for a topology without domains, with a rate that is not above 0 or with domains that do not
/// nest.
TESSERA_API Network cluster(const Topology& topology, int ranks);

/// The cost of one operation by `algorithm` on that network. `bytes` are those of the larger buffer. Throws
/// InvalidUsage for an algorithm without a cost model.
TESSERA_API OpCost collective_cost(const Topology& topology, int world, const SimulatedOp& operation,
                                   std::string_view algorithm);

/// The time that an operation takes when nothing else is in flight.
TESSERA_API std::chrono::nanoseconds time_alone(const Network& network, const OpCost& cost);

}  // namespace tessera::plan
