// Sums, scaling, reshaping and transposition.
#pragma once

#include "tessera/nn/tensor.h"

namespace tessera::nn::ops {

/// a + b of equal shapes, for residual connections. Saves nothing; both gradients share the output's gradient.
TESSERA_API Tensor add(const Tensor& a, const Tensor& b);
/// Records sum = a + b on the context's tape if it has one.
void record_add(const Tensor& a, const Tensor& b, Tensor& sum);

/// factor * x. Saves nothing.
TESSERA_API Tensor scale(const Tensor& x, double factor);

/// The same elements under another shape. Neither forward nor backward copies.
TESSERA_API Tensor reshape(const Tensor& x, Shape shape);

/// Swaps the last two dimensions; returns a copy.
TESSERA_API Tensor transpose(const Tensor& x);

}  // namespace tessera::nn::ops
