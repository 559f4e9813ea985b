// What a simulation needs to know about a cluster.
#pragma once

#include <optional>

#include "tessera/plan/kernel_costs.h"
#include "tessera/plan/topology.h"
#include "tools/plan/cluster_file.h"

namespace tessera::tools {

/// A cluster's network and machines as cost models. A value.
struct SimulatedCluster {
  ClusterSpec spec;
  plan::VirtualClock::Machine streams = plan::VirtualClock::Machine::synchronous;
  std::uint64_t loss_bytes = 0;  ///< what the world needs to add up losses, beyond what others need
  plan::KernelTime kernels;
  plan::Topology topology;
  bool measured = false;  ///< operations take measured times instead of those of the topology
  plan::Network network;
};

/// The cost models of a cluster for a world of `ranks`. Throws InvalidUsage if it has no room for them.
SimulatedCluster simulate(const ClusterSpec& cluster, int ranks);

/// The cluster of --link, --link-intra, --hosts and --machine: every rank has a port for each class of link, which its
/// operations pass in the order of their calls, and the algorithms are direct, as compare pins them. `hosts`: 1 if all
/// ranks are linked by `link`. Throws InvalidUsage unless `hosts` divides `ranks`.
ClusterSpec linked_cluster(const LinkSpec& link, const std::optional<LinkSpec>& intra, int hosts, int ranks,
                           const MachineSpec& machine);

}  // namespace tessera::tools
