// Element-wise activations and the gated unit of Llama.
#pragma once

#include "tessera/nn/kernels/activation.h"
#include "tessera/nn/tensor.h"

namespace tessera::nn::ops {

using kernels::Activation;

/// y = f(x). Saves x; the gradient takes over its output's memory where nobody else reads it.
TESSERA_API Tensor activation(Activation kind, const Tensor& x);
/// Appends to the context's tape, where one records, that y = f(x).
void record_activation(Activation kind, const Tensor& x, Tensor& y);
inline Tensor relu(const Tensor& x) { return activation(Activation::relu, x); }
inline Tensor gelu_tanh(const Tensor& x) { return activation(Activation::gelu_tanh, x); }
inline Tensor gelu_erf(const Tensor& x) { return activation(Activation::gelu_erf, x); }
inline Tensor silu(const Tensor& x) { return activation(Activation::silu, x); }

/// y = silu(gate) * up. Saves both.
TESSERA_API Tensor swiglu(const Tensor& gate, const Tensor& up);

}  // namespace tessera::nn::ops
