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

namespace tessera::nn {

inline Tensor operator+(const Tensor& a, const Tensor& b) { return ops::add(a, b); }  ///< ops::add()
/// a + (-1) * b
inline Tensor operator-(const Tensor& a, const Tensor& b) { return ops::add(a, ops::scale(b, -1.0)); }
inline Tensor operator*(double factor, const Tensor& x) { return ops::scale(x, factor); }  ///< ops::scale()
inline Tensor operator*(const Tensor& x, double factor) { return ops::scale(x, factor); }  ///< ops::scale()

}  // namespace tessera::nn
