// Conversions between floating types.
#pragma once

#include "tessera/nn/tensor.h"

namespace tessera::nn::ops {

/// Converts x to `dtype`; both are f32, f16 or bf16. If x already has that dtype, returns x itself: no copy, nothing
/// recorded. Saves nothing; the gradient is cast back. Throws Unsupported for other types.
TESSERA_API Tensor cast(const Tensor& x, DType dtype);

}  // namespace tessera::nn::ops
