// Detects when a training stops being finite.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "tessera/comm/host_collectives.h"

namespace tessera::tools {

/// Warns once, on rank 0's standard error, when the loss or the gradient norm is not finite, and names the ranks whose
/// own loss was not. One object per rank; each calls after_step() with the same `mean` and `norm`.
class DivergenceMonitor {
 public:
  /// `control` outlives it. `run` identifies this training in the warning.
  DivergenceMonitor(comm::HostCollectives& control, std::string run) : control_(control), run_(std::move(run)) {}
  /// `own` is this rank's loss, `mean` that of all ranks. `norm`: of the gradients, if it was measured and affects the
  /// parameters. Collective at the first step that diverges; else it exchanges nothing.
  void after_step(std::int64_t step, double own, double mean, std::optional<double> norm);
  /// Warns if no step has diverged, but the loss of the evaluation, that of all ranks, is not finite.
  void after_evaluation(double loss) const;

 private:
  comm::HostCollectives& control_;
  const std::string run_;
  bool warned_ = false;
};

}  // namespace tessera::tools
