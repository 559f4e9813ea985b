// The linear layer.
#pragma once

#include "tessera/nn/kernels/gemm.h"
#include "tessera/nn/tensor.h"

namespace tessera::nn::ops {

using kernels::WeightLayout;

/// y[..., out] = x[..., in] * W + bias[out]. `weight` is [out, in] or [in, out] by `layout`; `bias` may be an empty
/// tensor. Saves x where the weight wants a gradient.
TESSERA_API Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                          WeightLayout layout = WeightLayout::out_in);

}  // namespace tessera::nn::ops
