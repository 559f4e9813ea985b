// The linear layer.
#pragma once

#include "tessera/nn/kernels/gemm.h"
#include "tessera/nn/ops/activation.h"
#include "tessera/nn/tensor.h"

namespace tessera::nn::ops {

using kernels::WeightLayout;

/// y[..., out] = x[..., in] * W + bias[out]. `weight` is [out, in] or [in, out] by `layout`; `bias` may be an empty
/// tensor. Saves x where the weight wants a gradient.
TESSERA_API Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                          WeightLayout layout = WeightLayout::out_in);

/// activation(kind, linear(...)), in one pass where the device can. Saves what each of the two saves.
TESSERA_API Tensor activated_linear(Activation kind, const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                                    WeightLayout layout = WeightLayout::out_in);

/// A weight as bytes of nf4.h, and what it is decoded to.
struct Nf4Weight {
  Tensor encoded;  ///< u8, without a gradient
  Shape shape;     ///< [out, in] or [in, out]
  WeightLayout layout = WeightLayout::out_in;
};

/// linear() with the decoded weight, which takes memory while the product runs, and again in the backward. Throws
/// Unsupported on a device that has no kernel for it.
TESSERA_API Tensor linear(const Tensor& x, const Nf4Weight& weight, const Tensor& bias = {});

}  // namespace tessera::nn::ops
