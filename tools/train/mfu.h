// Model FLOPs utilization: which part of the machine's peak a training uses.
#pragma once

#include <optional>
#include <string_view>

#include "tools/train/plan.h"

namespace tessera::tools {

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
