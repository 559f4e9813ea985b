// The linear layer.
#pragma once

#include "tessera/nn/kernels/gemm.h"
#include "tessera/nn/ops/activation.h"
#include "tessera/nn/tensor.h"

namespace tessera::nn::ops {

using kernels::WeightLayout;

/// The extents of linear()'s arguments. Throws InvalidUsage for shapes or dtypes that don't fit each other.
TESSERA_API kernels::LinearShape linear_shape(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                              WeightLayout layout);

/// y[..., out] = x[..., in] * W + bias[out]. `weight` is [out, in] or [in, out], according to `layout`; `bias` may be
/// an empty tensor. Saves x if the weight requires a gradient.
TESSERA_API Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                          WeightLayout layout = WeightLayout::out_in);

/// linear() without a bias, for a weight [out, in], with rows that are padded as the device prefers: [..., padded],
/// padded = Context::padded_row(out). The elements after `out` are unspecified, and their gradients ignored. For
/// cross_entropy() with CrossEntropyOptions::vocabulary.
TESSERA_API Tensor padded_linear(const Tensor& x, const Tensor& weight);

/// activation(kind, linear(...)), in one pass if the device supports it. Saves what both operations save.
TESSERA_API Tensor activated_linear(Activation kind, const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                                    WeightLayout layout = WeightLayout::out_in);

/// A weight encoded as in nf4.h, and the shape of its decoded values.
struct Nf4Weight {
  Tensor encoded;                              ///< u8, without a gradient
  Shape shape;                                 ///< [out, in] or [in, out]
  WeightLayout layout = WeightLayout::out_in;  ///< layout of the decoded weight
};

/// linear() with the decoded weight, which occupies memory only while a product runs; backward decodes it again. Throws
/// Unsupported on a device without a kernel for it.
TESSERA_API Tensor linear(const Tensor& x, const Nf4Weight& weight, const Tensor& bias = {});

}  // namespace tessera::nn::ops
