// The engine's options for one strategy of a plan.
#pragma once

#include <string>
#include <vector>

#include "tessera/comm/bootstrap.h"
#include "tessera/fsdp/engine.h"
#include "tools/train/plan.h"

namespace tessera::tools {

/// The properties of a step that its cost depends on.
fsdp::StepShape step_shape_of(const StepOptions& o);

/// The engine's options for one strategy of the plan. Throws InvalidUsage if it can't run on this world.
fsdp::EngineOptions engine_options(const TrainPlan& plan, const std::string& strategy);

/// What the ranks of a training must have alike beside the engine's options, by the names of its options. Of data and
/// weights a sample is taken, and of outputs whether there are any: paths may differ between hosts.
std::vector<comm::SharedSetting> shared_settings_of(const TrainPlan& plan);

/// The names of the strategies to run: those of --strategies, or by default those that can run, and `left_out` gets the
/// reasons of the others. Throws InvalidUsage if one that was asked for can't run, or none can.
std::vector<std::string> strategies_of(const TrainPlan& plan, std::vector<std::string>& left_out);

/// With --accumulate: one line with what each --reduce-when would send and keep, before any rank starts; else "".
std::string accumulation_note(const TrainPlan& plan, const std::string& strategy);

}  // namespace tessera::tools
