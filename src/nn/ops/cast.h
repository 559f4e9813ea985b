// Conversions between floating types.
#pragma once

#include "tessera/nn/tensor.h"

namespace tessera::nn::ops {

/// x in `dtype`: f32, f16 or bf16, as is x. Where that is x's own, x itself: no copy, nothing recorded. Saves nothing;
/// the gradient is cast back. Throws Unsupported for other types.
TESSERA_API Tensor cast(const Tensor& x, DType dtype);

}  // namespace tessera::nn::ops
