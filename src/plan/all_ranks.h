// All ranks of a simulated world, where they are not equal: one rank's tasks, repeated for each with its own speed.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "tessera/plan/task_graph.h"
#include "tessera/plan/topology.h"
#include "tessera/plan/world.h"

namespace tessera::plan {

/// How ranks and links differ.
struct Variation {
  std::map<int, double> slow_ranks;  ///< factor of the time of a rank's work
  std::map<int, double> slow_hosts;  ///< factor of the time of bytes that leave or enter a host
  /// Standard deviation of the time of a task, as a part of it: each task of each rank takes 1 + jitter * |x| times as
  /// long, x from a normal distribution. Deterministic: the same for the same seed.
  double jitter = 0;
  std::uint64_t seed = 0;  ///< seed of the jitter
};

/// Ends of `marks` on each rank, in nanoseconds: result[rank][mark].
using RankTimes = std::vector<std::vector<std::int64_t>>;

/// Times the tasks of one rank, `graph`, on all `ranks`. `transfers` are those of the graph; an operation begins when
/// all members have called it. Throws InvalidUsage for a rank or host that does not exist and for factors below 0.01.
TESSERA_API RankTimes simulate_all_ranks(const TaskGraph& graph, std::span<const TransferRecord> transfers,
                                         const Topology& topology, int ranks, const Variation& variation,
                                         std::span<const TaskId> marks);

/// The graph with chains of work merged into single tasks. `kept`: tasks that remain; replaced by their new numbers.
TESSERA_API TaskGraph without_chains(const TaskGraph& graph, std::span<TaskId> kept);

}  // namespace tessera::plan
