// tessera bench --cluster: measures this machine and writes it as a cluster file.
#pragma once

#include <functional>
#include <string>

#include "tools/bench/options.h"
#include "tools/bench/runner.h"
#include "tools/cli/commands.h"
#include "tools/plan/cluster_file.h"

namespace tessera::tools {

/// Collective: measures links and kernels of this machine with the ranks of `world`, each with `threads`. The result of
/// rank 0 counts. `say` is called with a line before each part.
ClusterSpec measure_cluster(const BenchSpec& spec, comm::Communicator& world, int threads,
                            const std::function<void(const std::string&)>& say);

/// Runs the command: starts the ranks, or measures as one of them. Throws InvalidUsage.
int bench_cluster(const CommandLine& commands, const BenchOptions& options, BenchSpec spec);

}  // namespace tessera::tools
