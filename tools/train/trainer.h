// The training loop of one rank, and its measurements.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/trace.h"
#include "tessera/comm/communicator.h"
#include "tessera/fsdp/engine.h"
#include "tools/results/run_result.h"
#include "tools/train/plan.h"

namespace tessera::tools {

/// One finished step, as rank 0 reports it.
struct StepReport {
  std::int64_t step = 0;  ///< 1 is the first
  double loss = 0;        ///< global mean
  double tokens_per_second = 0;
  double grad_norm = 0;
  double learning_rate = 0;
  /// With f16: the loss scale of the next step, and whether this one was skipped because gradients overflowed.
  std::optional<double> loss_scale;
  bool skipped = false;
  std::uint64_t skipped_steps = 0;  ///< so far, those before a resumed checkpoint included
  std::uint64_t live_bytes = 0;     ///< of rank 0, as the memory tracker counts them, after the step
  std::uint64_t peak_bytes = 0;     ///< highest so far
  std::optional<double> mfu;        ///< nothing if the peak of the machine isn't known
};

struct TrainingCallbacks {
  std::function<void(const StepReport&)> on_step;  ///< rank 0 only
  bool measure_norm = false;
  /// Every rank: the engine has its values, and no step was made. What hooks refer to outlives the training.
  std::function<void(fsdp::Engine&)> on_ready;
  /// Every rank: the gradients of a step are complete, and the update is next. `loss`: of this rank.
  std::function<void(fsdp::Engine&, double loss)> before_update;
};

struct TrainingOutcome {
  RunResult result;                         ///< complete on rank 0
  std::vector<base::TraceEvent> last_step;  ///< of all ranks, on rank 0, if --trace was given
  std::string save_failure;                 ///< why no checkpoint of --save contains the last state; "" if one does
};

/// Calls, and bytes sent, in one of so many steps.
Calls calls_of(const fsdp::EngineTraffic& traffic, std::uint64_t steps);
Bytes bytes_of(const fsdp::EngineTraffic& traffic, std::uint64_t steps);

/// Collective: every rank of `world` calls it with the same plan. `memory_tracker` is the one that `world` uses.
TrainingOutcome run_training(const TrainPlan& plan, const std::string& strategy, comm::Communicator& world,
                             const std::shared_ptr<base::MemoryTracker>& memory_tracker,
                             const TrainingCallbacks& callbacks);

}  // namespace tessera::tools
