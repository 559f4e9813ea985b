// Measures what a training step costs besides its kernels and collectives, for `bench --cluster`.
#pragma once

#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tools/bench/machine_kernels.h"
#include "tools/plan/cluster_file.h"

namespace tessera::tools {

/// A training of a model, as measured and as simulated.
struct StepSample {
  std::string strategy;
  double measured_ms = 0;
  double simulated_ms = 0;
  double late_ms = 0;  ///< exposed communication, measured less simulated
};

/// From the samples of several models, each with several strategies. "others" have the ratios of the median strategy.
StepOverhead fit_step_overhead(const std::vector<std::vector<StepSample>>& models);

/// Collective: trains four models with several strategies on `world`, whose links and kernels `cluster` has. The
/// result of rank 0 counts.
StepOverhead measure_step_overhead(const ClusterSpec& cluster, comm::Communicator& world,
                                   const ComputeMeasurement& measurement);

}  // namespace tessera::tools
