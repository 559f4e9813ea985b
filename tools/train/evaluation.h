// What is measured of trained parameters: their loss over a file, and their fingerprint.
#pragma once

#include <string>

#include "tessera/comm/host_collectives.h"
#include "tessera/fsdp/engine.h"
#include "tessera/nn/models/causal_model.h"
#include "tools/results/run_result.h"
#include "tools/train/plan.h"

namespace tessera::tools {

/// Divides --eval's file into non-overlapping windows of seq_len inputs; a shorter rest is ignored. A rank with too few
/// windows runs an empty one, which does not count, so that every rank makes the same collective calls.
Evaluation evaluate(const TrainPlan& plan, nn::CausalModel& model, comm::HostCollectives& control);

/// XXH3-128, in hexadecimal, over the f32 values of every parameter without padding, by canonical name in byte order,
/// with tied tensors once. Collective; the same on every rank.
std::string hash_parameters(fsdp::Engine& engine);

}  // namespace tessera::tools
