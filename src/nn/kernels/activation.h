// Element-wise activations: forward from x, backward from the saved x (nothing else is saved).
#pragma once

#include <cstddef>

#include "tessera/nn/thread_pool.h"

namespace tessera::nn::kernels {

enum class Activation {
  relu,
  gelu_tanh,  ///< 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): GPT-2's "gelu_new"
  gelu_erf,   ///< x Phi(x): exact GELU
  silu,       ///< x sigmoid(x)
};

/// Arguments of activation_forward and swiglu_forward, for kernel tables.
template <class T>
struct ActivationForward {
  Activation kind = Activation::relu;
  const T* x = nullptr;
  T* y = nullptr;
  std::size_t count = 0;
};
template <class T>
struct SwigluForward {
  const T* gate = nullptr;
  const T* up = nullptr;
  T* y = nullptr;
  std::size_t count = 0;
};

/// y[count] = f(x); y may be x.
template <class T>
TESSERA_API void activation_forward(ThreadPool& pool, Activation kind, const T* x, T* y, std::size_t count);

/// dx = dy f'(x), or dx += dy f'(x) if `accumulate`; dx may be dy. ReLU's slope at 0 is 0.
template <class T>
struct ActivationBackward {
  const T* x = nullptr;  ///< forward's input
  const T* dy = nullptr;
  T* dx = nullptr;
  std::size_t count = 0;
  bool accumulate = false;
};
template <class T>
TESSERA_API void activation_backward(ThreadPool& pool, Activation kind, const ActivationBackward<T>& args);

/// y[count] = silu(gate) * up
template <class T>
TESSERA_API void swiglu_forward(ThreadPool& pool, const T* gate, const T* up, T* y, std::size_t count);

/// Gradients that are null are not computed. dgate may be gate or dy, dup may be up or dy (not both the same).
template <class T>
struct SwigluBackward {
  const T* gate = nullptr;
  const T* up = nullptr;
  const T* dy = nullptr;
  T* dgate = nullptr;
  T* dup = nullptr;
  std::size_t count = 0;
  bool accumulate_dgate = false;
  bool accumulate_dup = false;
};
template <class T>
TESSERA_API void swiglu_backward(ThreadPool& pool, const SwigluBackward<T>& args);

}  // namespace tessera::nn::kernels
