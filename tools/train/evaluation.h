// What is measured of trained parameters: their loss over a file, and their fingerprint.
#pragma once

#include <string>

#include "tessera/comm/host_collectives.h"
#include "tessera/fsdp/engine.h"
#include "tessera/fsdp/training_task.h"
#include "tools/results/run_result.h"
#include "tools/train/plan.h"

namespace tessera::tools {

/// The mean loss over the task's samples for it: of --eval's file the non-overlapping windows of seq_len inputs,
/// without a shorter rest. A rank with too few samples runs one that does not count, so that every rank makes the same
/// collective calls.
Evaluation evaluate(const TrainPlan& plan, fsdp::TrainingTask& task, comm::HostCollectives& control);

/// XXH3-128, in hexadecimal, over the f32 values of every parameter without padding, by canonical name in byte order,
/// with tied tensors once. Collective; the same on every rank.
std::string hash_parameters(fsdp::Engine& engine);

}  // namespace tessera::tools
