// Dropout.
#pragma once

#include <string_view>

#include "tessera/nn/tensor.h"

namespace tessera::nn::ops {

/// x / (1 - probability) where kept, else 0, for x[sample, ...]. The mask depends on the context's RngState, `module`
/// (a path), the global sample index and the element's index within the sample. It is never stored; backward
/// regenerates it. Returns x itself if the context is not training or the probability is 0. Throws InvalidUsage for a
/// probability outside [0, 1).
TESSERA_API Tensor dropout(const Tensor& x, double probability, std::string_view module);

}  // namespace tessera::nn::ops
