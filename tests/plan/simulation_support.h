// A training step that the simulation tests simulate and measure.
#pragma once

#include <string>
#include <utility>

#include "tessera/comm/init.h"
#include "tessera/plan/simulation.h"
#include "tessera/plan/world.h"

namespace tessera::plan {

inline nn::ModelConfig config_of(std::int64_t layers, std::int64_t width) {
  nn::ModelConfig config = nn::preset("gpt-nano");
  config.layers = layers;
  config.width = width;
  config.heads = width / 16;
  config.kv_heads = config.heads;
  config.head_dim = 16;
  config.hidden = 4 * width;
  return config;
}

inline TrainingStep step_of(const nn::ModelConfig& config, const fsdp::EngineOptions& engine,
                            std::int64_t positions = 16) {
  return {
      .make_task = [config, positions](
                       nn::Context& context) { return make_token_task(nn::make_model(context, config), positions); },
      .samples = 2,
      .engine = engine};
}

inline StepProfile predict_on(int ranks, const TrainingStep& step, const KernelCostModel& kernels, Network network,
                              int steps = 1, VirtualClock::Machine machine = VirtualClock::Machine::synchronous) {
  VirtualClock clock(machine);
  const auto world = make_world(ranks, clock, std::move(network));
  return predict_step(step, *world, clock, kernels, steps);
}

/// On a device whose operations take no time, and whose kernels take what `kernels` says.
inline StepProfile predict_step_on(int ranks, const TrainingStep& step, const KernelTime& kernels) {
  VirtualClock clock(VirtualClock::Machine::asynchronous);
  const auto world =
      make_world(ranks, clock, fixed_times([](const SimulatedOp&) { return std::chrono::nanoseconds(0); }));
  return predict_step(step, *world, clock, kernels, 1);
}

/// The profile of the last rank, the one that a simulation reports.
inline StepProfile measured_on(int ranks, const std::string& backend, const TrainingStep& step, int steps,
                               const comm::CommunicatorDecorator& decorate = {}) {
  StepProfile record;
  comm::InitOptions config;
  config.backend = backend;
  config.decorate = decorate;
  comm::run_threads(ranks, config, [&](comm::Communicator& world) {
    StepProfile mine = profile_step(step, world, steps);
    if (world.rank() + 1 == ranks) record = std::move(mine);
  });
  return record;
}

}  // namespace tessera::plan
