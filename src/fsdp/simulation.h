// What a training step takes: measured on ranks that compute, or foretold on one that only goes through the motions.
// Both run the same program: the same engine on the same model, with the same events.
//
//   fsdp::Step step{.make_model = .., .sequences = 8, .seq_len = 128, .engine = {.strategy = ..}};
//   nn::KernelCostModel kernels = fsdp::profile_step(small_step, world, 3).kernels;      // on every rank of a small
//   world base::VirtualClock clock(base::VirtualClock::Machine::host); auto simulated = comm::sim::make_world(64, clock,
//   comm::sim::alpha_beta(20us, 1.25e9)); fsdp::StepProfile foretold = fsdp::predict_step(step, *simulated, clock, kernels);
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/base/trace.h"
#include "tessera/base/virtual_clock.h"
#include "tessera/fsdp/engine.h"
#include "tessera/nn/kernel_interceptor.h"
#include "tessera/nn/models/causal_model.h"

namespace tessera::fsdp {

/// A training step of one rank.
struct TrainingStep {
  std::function<std::unique_ptr<nn::CausalModel>(nn::Context& context)> make_model;
  std::int64_t sequences = 1;  ///< in a microbatch
  std::int64_t seq_len = 1;
  int microbatches = 1;
  int threads = 1;
  EngineOptions engine;
};

struct StepTimes {
  std::int64_t step_ns = 0;     ///< from the batch to the end of the update, what is left in flight included
  std::int64_t exposed_ns = 0;  ///< of that, waited for collectives: unshard_wait and reduce_wait
  std::vector<TraceEvent> events;
};

struct StepProfile {
  std::vector<StepTimes> steps;
  MemoryTracker::Snapshot memory;  ///< of this rank
  EngineTraffic traffic;           ///< of the last step
  std::vector<UnitSize> units;     ///< as the formulas want them
  nn::KernelCostModel kernels;     ///< measured; what was given to predict_step()
};

/// Trains `steps` steps on this machine's host, with every kernel watched; collective. The first step also makes the
/// memory: its times are apart from the others'. Throws InvalidUsage for less than one step.
TESSERA_API StepProfile profile_step(const TrainingStep& step, comm::Communicator& world, int steps);

/// `steps` steps after a first one, in virtual time, on shapes without data: needs no memory for tensors. `world` is a
/// simulated one; it and the streams go by `clock`. Throws InvalidUsage, naming it, for a kernel that wasn't measured.
/// What the host does between kernels is taken to be nothing. Where replicas meet once in a period, ask for a period.
TESSERA_API StepProfile predict_step(const TrainingStep& step, comm::Communicator& world, base::VirtualClock& clock,
                                     const nn::KernelCostModel& kernels, int steps = 1);

}  // namespace tessera::fsdp
