// Says when a training stops being finite.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "tessera/comm/host_collectives.h"

namespace tessera::tools {

/// Warns once, on rank 0's standard error, when the loss or the norm of the gradients is no finite number, and names
/// the ranks whose own loss was not. One per rank; each calls after_step() with the same `mean` and `norm`.
class DivergenceMonitor {
 public:
  /// `control` outlives it. `run` tells this training from others, in the warning.
  DivergenceMonitor(comm::HostCollectives& control, std::string run) : control_(control), run_(std::move(run)) {}
  /// `own` is this rank's loss and `mean` that of all ranks. `norm`: of the gradients, where it was measured and
  /// decides what becomes of the parameters. Collective at the first step that diverges; else it exchanges nothing.
  void after_step(std::int64_t step, double own, double mean, std::optional<double> norm);

 private:
  comm::HostCollectives& control_;
  const std::string run_;
  bool warned_ = false;
};

}  // namespace tessera::tools
