// What is measured of a training beside its steps: the loss over a file, the parameters' fingerprint, the links between
// ranks, and which part of the machine's peak it uses.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tessera/comm/host_collectives.h"
#include "tessera/fsdp/engine.h"
#include "tessera/fsdp/training_task.h"
#include "tools/cli/quantities.h"
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

/// Latency and rate of the line through the times of all_gathers of several sizes, over the bytes that a rank sends.
/// Collective; takes some milliseconds over fast links, a second over 100 Mbit/s. The same on every rank. Nothing moves
/// between fewer than two ranks: then the latency is 0.
LinkSpec fit_link(comm::Communicator& world);

/// Model FLOPs utilization: the operations that a model of this shape needs for the tokens, 6 for each parameter and 12
/// for each layer, element of the width and position (Chowdhery et al., PaLM, 2022, appendix B), without recomputation,
/// as a part of `peak_flops`. Frozen parameters count 4. Causal attention computes half of what is counted for it, so a
/// machine without overheads exceeds 1.
double model_flops_utilization(const TrainPlan& plan, double tokens_per_second, double peak_flops);

/// The peak of a GPU by its vendor's name, in operations per second without sparsity. Nothing if it isn't known.
std::optional<double> peak_flops_of(std::string_view device, std::string_view dtype);

/// The peak of a rank: that of --peak-flops, else that of its device. Nothing if neither is known.
std::optional<double> peak_flops_of(const TrainPlan& plan);

}  // namespace tessera::tools
