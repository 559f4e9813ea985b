// What `tessera bench` measures besides operations.
#pragma once

#include "tools/bench/options.h"
#include "tools/plan/cluster_file.h"

namespace tessera::tools {

/// bench --cluster: measures this machine and writes it as a cluster file. Starts the ranks, or measures as one of
/// them. Throws InvalidUsage.
int bench_cluster(const CommandLine& commands, const BenchOptions& options, BenchSpec spec);

/// bench --compare: prints what differs between two files of results. Throws InvalidUsage.
int bench_compare(const BenchOptions& options);

/// A training of a model, as measured and as simulated.
struct StepSample {
  std::string strategy;
  double measured_ms = 0;
  double simulated_ms = 0;
  double late_ms = 0;  ///< exposed communication, measured less simulated
};

/// What a step costs besides its kernels and collectives, from the samples of several models, each with several
/// strategies. "others" have the ratios of the median strategy.
StepOverhead fit_step_overhead(const std::vector<std::vector<StepSample>>& models);

/// bench --of-step: what the calls of a training step cost on each backend. As bench_cluster().
int bench_of_step(const CommandLine& commands, const BenchOptions& options, const BenchSpec& spec);

}  // namespace tessera::tools
