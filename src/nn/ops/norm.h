// Layer norm and RMS norm over the last dimension.
#pragma once

#include "tessera/nn/tensor.h"

namespace tessera::nn::ops {

/// y = (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension; `bias` may be empty. Saves x and two
/// numbers per row.
TESSERA_API Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps = 1e-5);

/// y = x / sqrt(mean of x^2 + eps) * weight over the last dimension. Saves x and one number per row.
TESSERA_API Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps = 1e-6);

/// A sum and its norm, both tensors of the tape.
struct SummedNorm {
  Tensor sum;         ///< x + added
  Tensor normalized;  ///< the norm of `sum`
};
/// add(x, added) and its layer_norm(), with the same bits; one kernel where the device has it.
TESSERA_API SummedNorm add_layer_norm(const Tensor& x, const Tensor& added, const Tensor& weight, const Tensor& bias,
                                      double eps = 1e-5);
/// add(x, added) and its rms_norm(), as add_layer_norm().
TESSERA_API SummedNorm add_rms_norm(const Tensor& x, const Tensor& added, const Tensor& weight, double eps = 1e-6);

}  // namespace tessera::nn::ops
