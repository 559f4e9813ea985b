// Element-wise activations and Llama's gated unit.
#pragma once

#include "tessera/nn/kernels/activation.h"
#include "tessera/nn/tensor.h"

namespace tessera::nn::ops {

using kernels::Activation;

/// y = f(x). Saves x. The gradient reuses the memory of the output's gradient if nothing else reads it.
TESSERA_API Tensor activation(Activation kind, const Tensor& x);
/// Records y = f(x) on the context's tape if it has one.
void record_activation(Activation kind, const Tensor& x, Tensor& y);
/// max(x, 0).
inline Tensor relu(const Tensor& x) { return activation(Activation::relu, x); }
/// GELU by tanh; see Activation.
inline Tensor gelu_tanh(const Tensor& x) { return activation(Activation::gelu_tanh, x); }
/// Exact GELU; see Activation.
inline Tensor gelu_erf(const Tensor& x) { return activation(Activation::gelu_erf, x); }
/// X sigmoid(x).
inline Tensor silu(const Tensor& x) { return activation(Activation::silu, x); }

/// y = silu(gate) * up. Saves both.
TESSERA_API Tensor swiglu(const Tensor& gate, const Tensor& up);

}  // namespace tessera::nn::ops
