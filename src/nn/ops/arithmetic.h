// Sums, scaling, reshaping and transposition.
#pragma once

#include "tessera/nn/tensor.h"

namespace tessera::nn::ops {

/// a + b of equal shapes: the residual. Saves nothing; both gradients share the output's.
TESSERA_API Tensor add(const Tensor& a, const Tensor& b);

/// factor * x. Saves nothing.
TESSERA_API Tensor scale(const Tensor& x, double factor);

/// The same elements under another shape; no copy, forward or backward.
TESSERA_API Tensor reshape(const Tensor& x, Shape shape);

/// The last two dimensions swapped; a copy.
TESSERA_API Tensor transpose(const Tensor& x);

}  // namespace tessera::nn::ops
