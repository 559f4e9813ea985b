// Layer norm and RMS norm over the last dimension.
#pragma once

#include "tessera/nn/tensor.h"

namespace tessera::nn::ops {

/// y = (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension; `bias` may be empty. Saves x and two
/// numbers per row.
TESSERA_API Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps = 1e-5);

/// y = x / sqrt(mean of x^2 + eps) * weight over the last dimension. Saves x and one number per row.
TESSERA_API Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps = 1e-6);

}  // namespace tessera::nn::ops
