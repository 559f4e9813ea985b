// What the progress line says of a training.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>

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

}  // namespace tessera::tools
