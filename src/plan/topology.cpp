#include "tessera/plan/topology.h"

#include <bit>

#include "tessera/base/error.h"
#include "tessera/comm/schedule.h"

namespace tessera::plan {
namespace {

using std::chrono::nanoseconds;

nanoseconds rounded(double seconds) { return nanoseconds(later(0, seconds * 1e9)); }

/// The phase in which every member sends `bytes` to each other member at once.
OpPhase to_everyone(const Placement& place, double bytes, int rounds) {
  OpPhase phase{.bytes = bytes * (place.ranks() - 1), .latency = rounded(rounds * place.latency())};
  const int near = place.levels() == 0 ? place.ranks() : place.inside(1);
  if (near > 1) phase.loads.push_back({0, bytes * (near - 1)});
  for (int level = 1; level <= place.levels(); ++level)
    if (place.spans(level))
      phase.loads.push_back(
          {static_cast<std::uint32_t>(level), bytes * (place.ranks() - place.inside(level)) * place.in_domain(level)});
  return phase;
}

/// The phase in which `bytes` travel along a chain or ring through all members, host by host; `hops` messages in a row.
OpPhase around(const Placement& place, double bytes, int hops) {
  OpPhase phase{.bytes = bytes};
  const int ranks = place.ranks();
  if (place.levels() == 0 || place.inside(1) > 1) phase.loads.push_back({0, bytes});
  double latency = 0;
  int counted = 0;  // hops of a way around that leave an outer domain
  for (int level = place.levels(); level >= 1; --level) {
    if (!place.spans(level)) continue;
    phase.loads.push_back({static_cast<std::uint32_t>(level), bytes * place.communicators(level)});
    const int crossing = std::min((ranks + place.inside(level) - 1) / place.inside(level), ranks - 1);
    latency += (crossing - counted) * place.latency(level);
    counted = crossing;
  }
  latency += (ranks - 1 - counted) * place.latency(0);
  phase.latency = rounded(latency * hops / (ranks - 1));
  return phase;
}

/// The phase in which pairs of members at `distance` exchange `bytes`. `senders`: how many of the members of a
/// domain send, at most; 0 means all.
OpPhase at_distance(const Placement& place, int distance, double bytes, int senders = 0) {
  OpPhase phase{.bytes = bytes};
  int left = 0;  // the outermost domain that the messages leave
  for (int level = 1; level <= place.levels(); ++level)
    if (place.spans(level) && distance >= place.inside(level)) left = level;
  if (left == 0) phase.loads.push_back({0, bytes});
  for (int level = 1; level <= left; ++level) {
    const int sending = senders == 0 ? place.inside(level) : std::min(senders, place.inside(level));
    phase.loads.push_back({static_cast<std::uint32_t>(level), bytes * sending * place.communicators(level)});
  }
  phase.latency = rounded(place.latency(left));
  return phase;
}

/// Distances 1, 2, 4, ... below the number of ranks.
std::vector<int> distances(int ranks) {
  std::vector<int> all;
  for (int distance = 1; distance < ranks; distance *= 2) all.push_back(distance);
  return all;
}

void append(OpCost& cost, const OpCost& more) { cost.insert(cost.end(), more.begin(), more.end()); }

/// Recursive doubling of an all_gather of `bytes` in all: at distance d, d parts. The other way round it is recursive
/// halving of a reduce_scatter.
OpCost doubled_parts(const Placement& place, double bytes, bool from_far) {
  OpCost cost;
  for (const int distance : distances(place.ranks())) {
    const int parts = std::min(distance, place.ranks() - distance);
    cost.push_back(at_distance(place, distance, bytes * parts / place.ranks()));
  }
  if (from_far) std::ranges::reverse(cost);
  return cost;
}

OpCost everything_at_each_distance(const Placement& place, double bytes, int senders) {
  OpCost cost;
  for (const int distance : distances(place.ranks())) cost.push_back(at_distance(place, distance, bytes, senders));
  return cost;
}

/// Rings for all_gather and reduce_scatter, chains for operations with a root, direct messages for all others. For
/// all_reduce the faster of a ring and a double binary tree (chains inside the hosts), in which every rank sends and
/// receives each byte about twice.
OpCost vendor_cost(const Placement& place, const Topology& topology, const SimulatedOp& operation) {
  const int n = place.ranks();
  const auto bytes = static_cast<double>(operation.bytes);
  const comm::OpKind kind = operation.kind;
  const bool both = kind == comm::OpKind::all_reduce;
  if (kind == comm::OpKind::broadcast || kind == comm::OpKind::reduce) return {around(place, bytes, n - 1)};
  if (!both && kind != comm::OpKind::all_gather && kind != comm::OpKind::reduce_scatter)
    return {to_everyone(place, bytes / n, 1)};
  OpPhase ring = around(place, bytes * (n - 1) / n * (both ? 2 : 1), (n - 1) * (both ? 2 : 1));
  if (!both) return {ring};
  OpPhase tree = around(place, 2 * bytes, 0);
  const int near = place.levels() == 0 ? n : place.inside(1);
  const int hosts = (n + near - 1) / near;
  const double depth = std::bit_width(static_cast<unsigned>(hosts - 1)) * place.latency();
  tree.latency = rounded(2 * ((near - 1) * topology.latency_s + depth));
  const auto longest = [&](const OpPhase& phase) {
    double time = 0;
    for (const LinkLoad& load : phase.loads)
      time = std::max(time, load.bytes / (load.link == 0 ? topology.bytes_per_second
                                                         : topology.domains[load.link - 1].bytes_per_second));
    return time + static_cast<double>(phase.latency.count()) / 1e9;
  };
  return {longest(tree) < longest(ring) ? tree : ring};
}

/// One algorithm inside the hosts and one between: a reduction is first divided inside the host, then each rank reduces
/// its part with its counterparts on the other hosts; a gather is the reverse.
OpCost hierarchical_cost(const Placement& place, const SimulatedOp& operation) {
  const double bytes = static_cast<double>(operation.bytes);
  const int n = place.ranks();
  const int near = place.levels() == 0 ? n : place.inside(1);
  const int hosts = (n + near - 1) / near;
  const OpPhase inside{.loads = {{0, bytes * (near - 1) / near}},
                       .bytes = bytes * (near - 1) / near,
                       .latency = rounded((near - 1) * place.latency(0))};
  OpPhase between{.bytes = bytes / near * (hosts - 1) / hosts, .latency = rounded((hosts - 1) * place.latency())};
  for (int level = 1; level <= place.levels(); ++level)
    if (place.spans(level))
      between.loads.push_back(
          {static_cast<std::uint32_t>(level),
           bytes / near * (hosts - 1) / hosts * std::min(near, place.inside(level)) * place.communicators(level)});
  OpCost gathered, reduced;
  if (hosts > 1) gathered.push_back(between);
  if (near > 1) gathered.push_back(inside);
  reduced.assign(gathered.rbegin(), gathered.rend());
  if (operation.kind == comm::OpKind::all_gather) return gathered;
  if (operation.kind == comm::OpKind::all_reduce) append(reduced, gathered);
  return reduced;
}

void check(const Topology& topology) {
  if (!(topology.bytes_per_second > 0) || topology.latency_s < 0)
    throw base::InvalidUsage("topology: a port needs a rate above 0 and a latency of 0 or more");
  int inner = 1;
  for (const LinkDomain& domain : topology.domains) {
    if (domain.ranks < 1 || domain.ranks % inner != 0)
      throw base::InvalidUsage("topology: a domain of " + std::to_string(domain.ranks) +
                               " ranks can't consist of domains of " + std::to_string(inner));
    if (!(domain.bytes_per_second > 0) || domain.latency_s < 0)
      throw base::InvalidUsage("topology: the link out of " + std::to_string(domain.ranks) +
                               " ranks needs a rate above 0 and a latency of 0 or more");
    inner = domain.ranks;
  }
}

std::string_view chosen_algorithm(const Topology& topology, const SimulatedOp& operation) {
  const std::string_view wanted = topology.algorithms.choose(operation.kind, operation.bytes);
  if (!wanted.empty()) return wanted;
  return comm::default_algorithm(
      {.kind = operation.kind, .dtype = base::DType::u8, .ranks = operation.ranks, .count = operation.bytes});
}

}  // namespace

Placement::Placement(const Topology& topology, int world, const RankSet& members)
    : topology_(topology), ranks_(members.ranks) {
  const int last = members.first + (members.ranks - 1) * members.stride;
  for (const LinkDomain& domain : topology.domains) {
    const int start = last / domain.ranks * domain.ranks;
    inside_.push_back((last - std::max(start, members.first)) / members.stride + 1);
    in_domain_.push_back(std::min(start + domain.ranks, world) - start);
  }
}

std::vector<std::string> simulated_algorithms() {
  std::vector<std::string> all = comm::known_algorithms(false);
  for (const comm::OpKind kind :
       {comm::OpKind::all_gather, comm::OpKind::reduce_scatter, comm::OpKind::all_reduce, comm::OpKind::broadcast,
        comm::OpKind::reduce, comm::OpKind::gather, comm::OpKind::scatter, comm::OpKind::all_to_all})
    all.push_back(std::string(name_of(kind)) + "=vendor");
  for (const comm::OpKind kind : {comm::OpKind::all_gather, comm::OpKind::reduce_scatter, comm::OpKind::all_reduce})
    all.push_back(std::string(name_of(kind)) + "=hierarchical");
  return all;
}

OpCost collective_cost(const Topology& topology, int world, const SimulatedOp& operation, std::string_view algorithm) {
  const Placement place(topology, world, operation.members);
  const auto bytes = static_cast<double>(operation.bytes);
  const int n = operation.ranks;
  const comm::OpKind kind = operation.kind;
  const bool all_reduce = kind == comm::OpKind::all_reduce;
  const bool whole = kind == comm::OpKind::broadcast || kind == comm::OpKind::reduce;  // each member has all bytes
  if (kind == comm::OpKind::barrier) return everything_at_each_distance(place, 0, 0);
  if (algorithm == "vendor") return vendor_cost(place, topology, operation);
  if (algorithm == "hierarchical") return hierarchical_cost(place, operation);
  if (algorithm == "direct" || algorithm == "pairwise" || algorithm == "native" || kind == comm::OpKind::all_to_all)
    return {to_everyone(place, (whole ? bytes : bytes / n) * (all_reduce ? 2 : 1), all_reduce ? 2 : 1)};
  if (algorithm == "symmetric") return {to_everyone(place, bytes, 1)};
  if (algorithm == "ring")
    return {around(place, bytes * (n - 1) / n * (all_reduce ? 2 : 1), (n - 1) * (all_reduce ? 2 : 1))};
  if (algorithm == "pipelined") return {around(place, bytes, n - 1)};
  if (algorithm == "recursive_halving") return doubled_parts(place, bytes, true);
  if (algorithm == "rabenseifner") {
    OpCost cost = doubled_parts(place, bytes, true);
    append(cost, doubled_parts(place, bytes, false));
    return cost;
  }
  if (algorithm == "bruck" || (algorithm == "recursive_doubling" && !all_reduce))
    return doubled_parts(place, bytes, false);
  if (algorithm == "recursive_doubling") return everything_at_each_distance(place, bytes, 0);
  if (algorithm == "binomial" && (kind == comm::OpKind::gather || kind == comm::OpKind::scatter))
    return doubled_parts(place, bytes, false);
  if (algorithm == "binomial") return everything_at_each_distance(place, bytes, 1);
  if (algorithm == "tree") {  // up and down, pipelined: each rank sends at most to its children and its parent
    OpCost cost = everything_at_each_distance(place, bytes, 1);
    append(cost, OpCost(cost));
    return cost;
  }
  throw base::InvalidUsage("simulation: " + std::string(name_of(kind)) + "=" + std::string(algorithm) +
                           " has no cost model; choose another algorithm");
}

Network cluster(const Topology& topology, int ranks) {
  check(topology);
  Network network;
  network.sharing = topology.sharing;
  network.in_order = topology.in_order;
  network.links.push_back(topology.bytes_per_second);
  for (const LinkDomain& domain : topology.domains) network.links.push_back(domain.bytes_per_second);
  network.cost = [topology, ranks](const SimulatedOp& operation) {
    return collective_cost(topology, ranks, operation, chosen_algorithm(topology, operation));
  };
  return network;
}

nanoseconds time_alone(const Network& network, const OpCost& cost) {
  nanoseconds time{0};
  for (const OpPhase& phase : cost) {
    double longest = 0;
    for (const LinkLoad& load : phase.loads) longest = std::max(longest, load.bytes / network.links.at(load.link));
    time += rounded(longest) + phase.latency;
  }
  return time;
}

}  // namespace tessera::plan
