// What is said of the steps of a training: its progress, and a warning once they are not finite.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/comm/host_collectives.h"
#include "tools/train/trainer.h"

namespace tessera::tools {

/// Rate and remaining time are those of the last steps, so that neither the slow first step nor an old pause counts.
class StepProgress {
 public:
  explicit StepProgress(const TrainPlan& plan);
  /// Call it at the end of each step: "step 12/20  loss 3.3627  3456 tokens/s  ETA 1:05  memory 34.2 MB, peak 56.1 MB";
  /// then the MFU if it is known, and with f16 the loss scale and the skipped steps.
  std::string text_after(const StepReport& step);

 private:
  using Clock = std::chrono::steady_clock;
  const std::int64_t steps_;
  const double tokens_;                 // of a step
  std::deque<Clock::time_point> ends_;  // of the last steps
};

/// Prints a line that the launcher of this rank shows as its progress line.
void print_progress(std::string_view text);

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
