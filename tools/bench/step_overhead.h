// Measures what a training step costs besides its kernels and collectives, for `bench --cluster`.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
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

/// Collective: trains several models with several strategies on `world`, whose links and kernels `cluster` has. The
/// result of rank 0 counts. `say` is called with a line before each training.
StepOverhead measure_step_overhead(const ClusterSpec& cluster, comm::Communicator& world, int threads,
                                   const std::function<void(const std::string&)>& say);

}  // namespace tessera::tools
