// The mean loss over a whole file.
#pragma once

#include "tessera/comm/host_collectives.h"
#include "tessera/nn/models/causal_model.h"
#include "tools/compare/run_result.h"
#include "tools/train/options.h"

namespace tessera::tools {

/// Divides --eval's file into non-overlapping windows of seq_len inputs; a shorter rest is ignored. A rank with too few
/// windows runs an empty one, which does not count, so that every rank makes the same collective calls.
Evaluation evaluate(const TrainPlan& plan, nn::CausalModel& model, comm::HostCollectives& control);

}  // namespace tessera::tools
