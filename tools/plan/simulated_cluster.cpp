#include "tools/plan/cluster_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "tessera/base/dtype.h"
#include "tessera/base/error.h"
#include "tessera/plan/cost_table.h"

namespace tessera::tools {

using base::InvalidUsage;

namespace {

constexpr double kMicroseconds = 1e-6;

/// The file's "nccl" is the simulation's "vendor".
comm::AlgorithmTable algorithms_of(const ClusterSpec& cluster) {
  std::string text;
  for (const auto& [operation, choice] : cluster.algorithms)
    text += (text.empty() ? "" : ",") + operation + "=" + (choice == "nccl" ? "vendor" : choice);
  return {text, plan::simulated_algorithms()};
}

plan::Topology topology_of(const ClusterSpec& cluster) {
  plan::Topology topology;
  topology.bytes_per_second = cluster.intra.bytes_per_second;
  topology.latency_s = cluster.intra.latency_us * kMicroseconds;
  topology.sharing = cluster.sharing;
  topology.in_order = cluster.sharing == PortSharing::fair;
  topology.algorithms = algorithms_of(cluster);
  if (!cluster.inter) return topology;
  plan::LinkDomain domain{.ranks = cluster.ranks_per_host,
                          .bytes_per_second = cluster.inter->bytes_per_second * cluster.nics_per_host,
                          .latency_s = cluster.inter->latency_us * kMicroseconds};
  topology.domains.push_back(domain);
  for (const std::optional<SwitchSpec>& level : {cluster.rack, cluster.spine}) {
    if (!level) continue;
    domain.ranks *= level->members;
    domain.bytes_per_second *= level->members / level->oversubscription;
    topology.domains.push_back(domain);
  }
  return topology;
}

/// Seconds by operation and number of ranks.
using CollectiveTimes = std::map<std::pair<std::string, int>, plan::CostTable>;

CollectiveTimes times_of(const ClusterSpec& cluster, std::vector<MeasuredPoint> MeasuredCollective::*points) {
  CollectiveTimes tables;
  for (const auto& [operation, measurements] : cluster.measured)
    for (const MeasuredCollective& one : measurements)
      for (const auto& [bytes, us] : one.*points) tables[{operation, one.ranks}].add(bytes, us * kMicroseconds);
  return tables;
}

std::optional<double> seconds_of(const CollectiveTimes& tables, const plan::SimulatedOp& operation) {
  const auto found = tables.find({std::string(comm::name_of(operation.kind)), operation.ranks});
  if (found == tables.end()) return std::nullopt;
  return found->second.at(static_cast<double>(operation.bytes));
}

/// Measured operations share one wire, which each occupies for its gap; what is left of its time is latency, during
/// which the next one may pass. Without a gap, two at the same time take twice as long.
void use_measurements(plan::Network& network, const ClusterSpec& cluster) {
  constexpr double kPerSecond = 1e9;
  if (cluster.measured.empty()) return;
  network.busy = [tables = times_of(cluster, &MeasuredCollective::busy)](const plan::SimulatedOp& operation) {
    return std::chrono::nanoseconds(plan::later(0, seconds_of(tables, operation).value_or(0) * 1e9));
  };
  CollectiveTimes tables = times_of(cluster, &MeasuredCollective::points);
  if (tables.empty()) return;
  const auto wire = static_cast<std::uint32_t>(network.links.size());
  network.links.push_back(kPerSecond);
  network.cost = [tables = std::move(tables), gaps = times_of(cluster, &MeasuredCollective::gap), wire,
                  otherwise = network.cost](const plan::SimulatedOp& operation) {
    const std::optional<double> seconds = seconds_of(tables, operation);
    if (!seconds) return otherwise(operation);
    const double gap = std::min(seconds_of(gaps, operation).value_or(*seconds), *seconds), load = gap * kPerSecond;
    const std::chrono::nanoseconds latency(plan::later(0, (*seconds - gap) * 1e9));
    return plan::OpCost{{.loads = {{wire, load}}, .bytes = load, .latency = latency}};
  };
}

/// Products and attention at a part of the peak, but no faster than their bytes pass memory; everything else at the
/// memory's rate. Measured kernels take their measured times.
plan::KernelTime kernel_time(const ClusterSpec& cluster) {
  std::map<std::pair<std::string, base::DType>, plan::CostTable> tables;
  for (const MeasuredKernel& kernel : cluster.compute.kernels)
    for (const auto& [size, seconds] : kernel.points)
      tables[{kernel.kernel, base::parse_dtype(kernel.dtype)}].add(size, seconds);
  return
      [tables = std::move(tables), compute = cluster.compute, name = cluster.name](const nn::KernelInvocation& call) {
        const auto found = tables.find({std::string(call.kernel), call.dtype});
        const double latency = compute.kernel_latency_us * kMicroseconds;
        if (found != tables.end()) return latency + found->second.at(call.size);
        if (compute.host_link_bytes_per_second > 0 && call.kernel.starts_with("copy_"))
          return latency + call.size / compute.host_link_bytes_per_second;
        const double memory_rate = compute.memory_bytes_per_second * compute.efficiencies.memory;
        if (call.product.count == 0) return latency + call.size / memory_rate;
        const std::string dtype = call.kernel == "fp8_product" ? "fp8" : std::string(base::name_of(call.dtype));
        const auto peak = compute.peak_flops.find(dtype);
        if (peak == compute.peak_flops.end())
          throw InvalidUsage(
              fmt::format("cluster {}: no peak for products of {}; add compute.peak_flops.{}", name, dtype, dtype));
        const bool attention = call.kernel.starts_with("attention");
        const double rate = peak->second * (attention ? compute.efficiencies.attention : compute.efficiencies.product);
        // The machine of --machine has two rates and nothing else.
        const bool on_device = compute.kind == ComputeSpec::Kind::device;
        return latency + std::max(call.size / rate, on_device ? (call.reads + call.writes) / memory_rate : 0);
      };
}

}  // namespace

SimulatedCluster simulate(const ClusterSpec& cluster, int ranks) {
  check_room(cluster, ranks);
  SimulatedCluster simulated;
  simulated.spec = cluster;
  if (cluster.compute.kind == ComputeSpec::Kind::device) simulated.streams = plan::VirtualClock::Machine::asynchronous;
  simulated.kernels = kernel_time(cluster);
  simulated.topology = topology_of(cluster);
  simulated.measured = !times_of(cluster, &MeasuredCollective::points).empty();
  simulated.network = plan::cluster(simulated.topology, ranks);
  for (const MeasuredCommunicator& one : cluster.communicators) {
    simulated.network.memory[one.ranks] = {one.bytes, one.ordinary_bytes};
    if (one.ranks == ranks) simulated.loss_bytes = one.ordinary_bytes;
  }
  use_measurements(simulated.network, cluster);
  return simulated;
}

ClusterSpec linked_cluster(const LinkSpec& link, const std::optional<LinkSpec>& intra, int hosts, int ranks,
                           const MachineSpec& machine) {
  if (ranks % hosts != 0)
    throw InvalidUsage(fmt::format("--hosts {}: {} ranks don't divide into hosts of equal size; use a divisor of {}",
                                   hosts, ranks, ranks));
  ClusterSpec cluster;
  cluster.name = "link";
  cluster.sharing = PortSharing::in_order;
  for (const char* operation : {"all_gather", "reduce_scatter", "all_reduce"}) cluster.algorithms[operation] = "direct";
  cluster.intra = intra.value_or(link);
  cluster.ranks_per_host = ranks;
  if (hosts > 1) {
    cluster.hosts = hosts;
    cluster.ranks_per_host = ranks / hosts;
    cluster.nics_per_host = cluster.ranks_per_host;
    cluster.inter = link;
  }
  for (const char* dtype : {"f32", "bf16", "f16", "fp8"}) cluster.compute.peak_flops[dtype] = machine.flops;
  cluster.compute.memory_bytes_per_second = machine.bytes_per_second;
  return cluster;
}

}  // namespace tessera::tools
