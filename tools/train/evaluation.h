// The mean loss over a whole file.
#pragma once

#include "tessera/comm/host_collectives.h"
#include "tessera/nn/models/causal_model.h"
#include "tools/compare/run_result.h"
#include "tools/train/options.h"

namespace tessera::tools {

/// Cuts --eval's file into non-overlapping windows of seq_len inputs; a shorter rest is left out.
/// Ranks short of windows run an empty one, so that every rank makes the same collective calls; it counts for nothing.
Evaluation evaluate(const TrainPlan& plan, nn::CausalModel& model, comm::HostCollectives& control);

}  // namespace tessera::tools
