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
  double calls = 0;       ///< of collectives in a step, control calls included
  double exposed_ms = 0;  ///< measured less planned
};

/// The overheads with the least sum of relative absolute errors. The factor is at least 0.8 and at most 1.5.
StepOverhead fit_step_overhead(const std::vector<StepSample>& samples);

/// Collective: trains several models with several strategies on `world`, whose links and kernels `cluster` has. The
/// result of rank 0 counts. `say` is called with a line before each training.
StepOverhead measure_step_overhead(const ClusterSpec& cluster, comm::Communicator& world, int threads,
                                   const std::function<void(const std::string&)>& say);

}  // namespace tessera::tools
