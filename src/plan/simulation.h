// The duration of a training step: measured on ranks that compute, or predicted on one simulated rank that computes
// nothing. Both run the same program: the same engine on the same model, with the same events.
//
//   plan::TrainingStep step{.make_task = .., .samples = 8, .engine = {.strategy = ..}};
//   // on every rank of a small world:
//   plan::KernelCostModel kernels = plan::profile_step(small_step, world, 3).kernels;
//   plan::VirtualClock clock(plan::VirtualClock::Machine::synchronous);
//   auto simulated = plan::make_world(64, clock, plan::alpha_beta(20us, 1.25e9));
//   plan::StepProfile predicted = plan::predict_step(step, *simulated, clock, kernels);
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/base/memory_tracker.h"
#include "tessera/base/trace.h"
#include "tessera/fsdp/engine.h"
#include "tessera/fsdp/training_task.h"
#include "tessera/nn/models/causal_model.h"
#include "tessera/plan/kernel_costs.h"

/// Prediction: what a training step needs and how long it takes, from the engine itself on a virtual clock.
namespace tessera::plan {

/// A training step of one rank.
struct TrainingStep {
  /// The model and its data, which compute in `context`. Called once per profile or prediction.
  std::function<std::unique_ptr<fsdp::TrainingTask>(nn::Context& context)> make_task;
  std::int64_t samples = 1;              ///< samples in a microbatch
  int microbatches = 1;                  ///< backwards per step
  int threads = 1;                       ///< compute threads of the rank
  std::optional<nn::Products> products;  ///< matrix products on the host; empty: TESSERA_PRODUCTS
  fsdp::EngineOptions engine;            ///< strategy, wrapping, optimizer
  bool memory_history = false;           ///< fill StepTimes::memory; not with `continuous`
  /// False: a step ends when all that it issued is done. True: as in training, the next one begins when the parameters
  /// are updated, while all-gathers of updated parameters may be in flight; it waits for those that it needs.
  bool continuous = false;
};

/// A task of a decoder whose samples are `positions` tokens that mean nothing: for steps whose time matters, not their
/// values.
TESSERA_API std::unique_ptr<fsdp::TrainingTask> make_token_task(std::unique_ptr<nn::CausalModel> model,
                                                                std::int64_t positions);

/// Runs the forwards and backwards of step `number`, as a training loop does.
TESSERA_API void run_microbatches(const TrainingStep& step, fsdp::TrainingTask& task, fsdp::Engine& engine, int number);

/// The duration of one step, with its trace events.
struct StepTimes {
  std::int64_t begin_ns = 0;    ///< begin of the step, on the clock of the events
  std::int64_t step_ns = 0;     ///< time from the batch to the end of the update; with work in flight unless continuous
  std::int64_t exposed_ns = 0;  ///< exposed communication: the part spent in unshard_wait and reduce_wait
  std::vector<base::TraceEvent> events;  ///< events of this rank
  base::MemoryHistory memory;            ///< live bytes over the step, on the clock of the events; if asked for
  TaskId begin_task = 0;    ///< task of a prediction that is done when the step begins; in the clock's graph
  TaskId end_task = 0;      ///< likewise the end of the step
  TaskId first_issued = 0;  ///< first of the tasks that the step of a prediction issued
  TaskId issued_end = 0;    ///< end of these tasks; all-gathers that the step leaves in flight are among them
};

/// The result of profile_step() and predict_step().
struct StepProfile {
  std::vector<StepTimes> steps;            ///< steps in order; without the first step of a prediction
  base::MemoryTracker::Snapshot memory;    ///< memory of this rank
  fsdp::ModelStateBytes model_state;       ///< the most after a backward or an optimizer step
  fsdp::EngineTraffic traffic;             ///< traffic of all steps but the first
  std::uint64_t copied_bytes = 0;          ///< likewise: EngineStats::copied_bytes()
  std::vector<fsdp::UnitStats> units;      ///< units in forward order
  std::vector<fsdp::UnitSize> unit_sizes;  ///< input of the formulas
  fsdp::MeshShape mesh;                    ///< mesh that the engine uses
  KernelCostModel kernels;                 ///< measured kernels; empty for a prediction
};

/// Trains `steps` steps on this machine's host and times every kernel. Collective. The first step also allocates the
/// memory, so its times differ from the others'. Throws InvalidUsage for less than one step and for memory_history of
/// continuous steps, as predict_step() does.
TESSERA_API StepProfile profile_step(const TrainingStep& step, comm::Communicator& world, int steps);

/// Simulates `steps` steps after a first one, in virtual time, on shapes without data: allocates no memory for tensors.
/// `world` is a simulated world; it and the streams use `clock`. Throws what `kernels` throws. The host's work between
/// kernels is assumed to take no time. For strategies with a sync period, simulate one period.
TESSERA_API StepProfile predict_step(const TrainingStep& step, comm::Communicator& world, VirtualClock& clock,
                                     const KernelTime& kernels, int steps = 1);

/// The same with an interceptor that adds the time of each kernel call to `clock` itself.
TESSERA_API StepProfile predict_step(const TrainingStep& step, comm::Communicator& world, VirtualClock& clock,
                                     nn::KernelInterceptor& kernels, int steps = 1);

}  // namespace tessera::plan
