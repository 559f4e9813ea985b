// The cluster that a plan is for: hosts, links and compute, as a struct, as a JSON file (docs/plan.md has the schema),
// and as what a simulation needs to know about it.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/plan/kernel_costs.h"
#include "tessera/plan/topology.h"
#include "tools/cli/quantities.h"

namespace tessera::tools {

/// A switch level: `members` of the level below share its uplinks, which carry 1 / oversubscription of what the members
/// could send together.
struct SwitchSpec {
  int members = 1;              ///< JSON: hosts_per_rack or racks_per_pod
  double oversubscription = 1;  ///< 1: no limit of its own
  bool operator==(const SwitchSpec&) const = default;
};

/// How transfers that use a port at the same time share it.
using PortSharing = plan::LinkSharing;

/// (x, y) of a measured table, x strictly increasing.
using MeasuredPoint = std::pair<double, double>;

/// A measured collective: used instead of a schedule on links.
struct MeasuredCollective {
  int ranks = 1;
  std::vector<MeasuredPoint> points;  ///< bytes of the larger buffer, microseconds
  std::vector<MeasuredPoint> busy;    ///< likewise the time that a call takes from the computation of its rank
  std::vector<MeasuredPoint> gap;     ///< likewise by how much a second call lengthens one in flight; none: by its time
  bool operator==(const MeasuredCollective&) const = default;
};

/// What a communicator needs on each of its ranks.
struct MeasuredCommunicator {
  int ranks = 1;
  std::uint64_t bytes = 0;           ///< as long as it exists
  std::uint64_t ordinary_bytes = 0;  ///< further bytes once it has reduced host memory that it did not allocate
  bool operator==(const MeasuredCommunicator&) const = default;
};

/// A measured kernel: used instead of peak and efficiency.
struct MeasuredKernel {
  std::string kernel;                 ///< the name that its owner gives it, such as "product"
  std::string dtype;                  ///< as base::name_of()
  std::vector<MeasuredPoint> points;  ///< size (operations of a product, else bytes), seconds
  bool operator==(const MeasuredKernel&) const = default;
};

/// Parts of the peak that are reached, above 0 and at most 1.
struct Efficiencies {
  double product = 1;    ///< of peak_flops, in products of large matrices
  double attention = 1;  ///< of peak_flops, in attention
  double memory = 1;     ///< of memory_bytes_per_second
  bool operator==(const Efficiencies&) const = default;
};

/// How far a training step is from its simulation: batches, issuing, cores and caches that ranks share, and waits for
/// ranks that come later.
struct StepOverhead {
  /// Simulated and measured time in ms, by strategy, and of "others"; none: equal.
  std::map<std::string, std::vector<MeasuredPoint>> steps;
  double late = 0;  ///< part of the step in which a rank waits for later ones: exposed
  bool operator==(const StepOverhead&) const = default;
};

/// What one rank computes with.
struct ComputeSpec {
  enum class Kind : std::uint8_t {
    host,   ///< a rank's streams share its cores: copies and compute don't overlap
    device  ///< streams overlap
  };
  Kind kind = Kind::host;
  double memory_bytes = 0;                   ///< of one rank
  std::map<std::string, double> peak_flops;  ///< by dtype, operations per second of one rank
  double memory_bytes_per_second = 0;        ///< of one rank
  double host_link_bytes_per_second = 0;     ///< of a device's link to its host, one direction; 0: as memory
  double kernel_latency_us = 0;              ///< start of one kernel
  StepOverhead overhead;
  Efficiencies efficiencies;
  std::vector<MeasuredKernel> kernels;
  bool operator==(const ComputeSpec&) const = default;
};

/// Where a figure is from.
struct Reference {
  std::string key;     ///< path of the figure in the file, such as "links.inter"
  std::string value;   ///< the figure in words, and how it was derived
  std::string source;  ///< a public document, or "assumed"
  bool operator==(const Reference&) const = default;
};

struct ClusterSpec {
  std::string name;
  std::string description;
  int hosts = 0;  ///< 0: as many as the ranks need
  int ranks_per_host = 1;
  int nics_per_host = 1;          ///< network cards, shared by the ranks of a host
  LinkSpec intra;                 ///< a rank's port inside its host
  std::optional<LinkSpec> inter;  ///< one network card; nothing: the cluster is one host
  std::optional<SwitchSpec> rack;
  std::optional<SwitchSpec> spine;  ///< above racks
  PortSharing sharing = PortSharing::fair;
  /// By operation: "nccl", or algorithms by size as in TESSERA_ALGO ("ring:64K-max;tree:0-64K"). Operations that are
  /// not listed: the default of src/comm.
  std::map<std::string, std::string> algorithms;
  std::map<std::string, std::vector<MeasuredCollective>> measured;  ///< by operation, one for each number of ranks
  std::vector<MeasuredCommunicator> communicators;                  ///< one for each number of ranks
  ComputeSpec compute;
  std::vector<Reference> sources;
  bool operator==(const ClusterSpec&) const = default;
};

/// Parses the content of a file. `file` is its name for errors. Throws InvalidUsage: one line with file, key and what
/// is expected.
ClusterSpec parse_cluster(std::string_view text, const std::string& file);

/// The form that parse_cluster() reads back as an equal cluster.
nlohmann::ordered_json to_json(const ClusterSpec& cluster);

/// All presets, those of clusters.json: small machines first. Each figure has its reference in ClusterSpec::sources.
std::vector<ClusterSpec> cluster_presets();

/// The preset of this name, else the cluster in the file of this name. Throws InvalidUsage, which names the option.
ClusterSpec find_cluster(const std::string& name_or_file, std::string_view option = "--cluster");

/// Throws InvalidUsage if the cluster has no room for this number of ranks.
void check_room(const ClusterSpec& cluster, int ranks);

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
