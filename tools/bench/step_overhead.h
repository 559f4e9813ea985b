// Measures what a training step costs besides its kernels and collectives, for `bench --cluster`.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tools/plan/cluster_file.h"

namespace tessera::tools {

/// A small training, as measured and as planned without overhead.
struct StepSample {
  double measured_ms = 0;
  double planned_ms = 0;
  double calls = 0;  ///< of collectives in a step, control calls included
};

/// The overheads that explain the differences; 0 where a plan is not too fast.
StepOverhead fit_step_overhead(const std::vector<StepSample>& samples);

/// Collective: trains small models with several strategies on `world`, whose links and kernels `cluster` has. The
/// result of rank 0 counts. `say` is called with a line before each training.
StepOverhead measure_step_overhead(const ClusterSpec& cluster, comm::Communicator& world, int threads,
                                   const std::function<void(const std::string&)>& say);

}  // namespace tessera::tools
