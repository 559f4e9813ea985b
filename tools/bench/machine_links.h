// Measures what the collectives of training take on this machine, for `bench --cluster`.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tools/bench/runner.h"
#include "tools/plan/cluster_file.h"

namespace tessera::tools {

/// By operation, one table for each number of ranks.
using CollectiveTables = std::map<std::string, std::vector<MeasuredCollective>>;

/// The sizes of communicators that a mesh of `ranks` may have: the divisors from 2.
std::vector<int> group_sizes(int ranks);

/// Collective: measures each operation of `spec` at its sizes on groups of every such number of ranks, all groups at
/// once as in training; rank 0's result counts. `say` is called with a line before each operation.
CollectiveTables measure_collectives(const BenchSpec& spec, comm::Communicator& world,
                                     const std::function<void(const std::string&)>& say);

/// Collective: the memory of communicators of 1 rank and of those of group_sizes() on this rank. `world` has a memory
/// tracker.
std::vector<MeasuredCommunicator> measure_communicators(comm::Communicator& world);

/// The link of one rank that explains the tables of all_gather among all ranks. Throws InvalidUsage for tables without
/// three sizes.
LinkSpec fit_link(const CollectiveTables& tables, int ranks);

}  // namespace tessera::tools
