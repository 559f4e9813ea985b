// Element-wise activations: forward from x, backward from the saved x (nothing else is saved).
#pragma once

#include <cstddef>

#include "tessera/nn/thread_pool.h"

namespace tessera::nn::kernels {

/// The element-wise functions of a feed-forward layer.
enum class Activation {
  relu,       ///< max(x, 0)
  gelu_tanh,  ///< 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): GPT-2's "gelu_new"
  gelu_erf,   ///< x Phi(x): exact GELU
  silu,       ///< x sigmoid(x)
};

/// Arguments of activation_forward and swiglu_forward, for kernel tables.
template <class T>
struct ActivationForward {
  Activation kind = Activation::relu;  ///< f
  const T* x = nullptr;                ///< [count]
  T* y = nullptr;                      ///< [count]; may be x
  std::size_t count = 0;               ///< elements
};
/// Arguments of swiglu_forward, for kernel tables.
template <class T>
struct SwigluForward {
  const T* gate = nullptr;  ///< [count]
  const T* up = nullptr;    ///< [count]
  T* y = nullptr;           ///< [count]
  std::size_t count = 0;    ///< elements
};

/// y[count] = f(x); y may be x.
template <class T>
TESSERA_API void activation_forward(ThreadPool& pool, Activation kind, const T* x, T* y, std::size_t count);

/// dx = dy f'(x), or dx += dy f'(x) if `accumulate`; dx may be dy. ReLU's slope at 0 is 0.
template <class T>
struct ActivationBackward {
  const T* x = nullptr;     ///< forward's input
  const T* dy = nullptr;    ///< gradient of forward's output
  T* dx = nullptr;          ///< gradient of x
  std::size_t count = 0;    ///< elements of each array
  bool accumulate = false;  ///< true: dx += ...
};
/// `kind`: as in forward.
template <class T>
TESSERA_API void activation_backward(ThreadPool& pool, Activation kind, const ActivationBackward<T>& args);

/// y[count] = silu(gate) * up
template <class T>
TESSERA_API void swiglu_forward(ThreadPool& pool, const T* gate, const T* up, T* y, std::size_t count);

/// Gradients that are null are not computed. dgate may be gate or dy, dup may be up or dy (not both the same).
template <class T>
struct SwigluBackward {
  const T* gate = nullptr;        ///< forward's input
  const T* up = nullptr;          ///< forward's input
  const T* dy = nullptr;          ///< gradient of forward's output
  T* dgate = nullptr;             ///< gradient of gate, or null
  T* dup = nullptr;               ///< gradient of up, or null
  std::size_t count = 0;          ///< elements of each array
  bool accumulate_dgate = false;  ///< true: dgate += ...
  bool accumulate_dup = false;    ///< true: dup += ...
};
/// The gradients of swiglu_forward.
template <class T>
TESSERA_API void swiglu_backward(ThreadPool& pool, const SwigluBackward<T>& args);

}  // namespace tessera::nn::kernels
