// Layer norm and RMS norm over the last dimension. A row's sum: 32 partial sums combined in a fixed tree. Sums over
// rows (weight and bias gradients): at most 16 row tiles, combined in order.
#pragma once

#include <cstddef>

#include "tessera/nn/kernels/opmath.h"
#include "tessera/nn/thread_pool.h"

namespace tessera::nn::kernels {

/// y = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(variance + eps), variance with 1/width. y may be x if no
/// backward follows. mean and rstd may both be null (nothing saved).
template <class T>
struct LayerNormForward {
  std::size_t rows = 0, width = 0;
  const T* x = nullptr;       ///< [rows, width]
  const T* weight = nullptr;  ///< [width]
  const T* bias = nullptr;    ///< [width], or null
  Wide<T> eps = Wide<T>(1e-5);
  T* y = nullptr;     ///< [rows, width]
  Wide<T>* mean = nullptr;  ///< [rows], saved for backward
  Wide<T>* rstd = nullptr;  ///< [rows], saved for backward
};
template <class T>
TESSERA_API void layer_norm_forward(ThreadPool& pool, const LayerNormForward<T>& args);

/// Gradients that are null are not computed. dx may be dy.
template <class T>
struct LayerNormBackward {
  std::size_t rows = 0, width = 0;
  const T* x = nullptr;
  const T* weight = nullptr;
  const Wide<T>* mean = nullptr;
  const Wide<T>* rstd = nullptr;
  const T* dy = nullptr;
  T* dx = nullptr;
  T* dweight = nullptr;
  T* dbias = nullptr;
  bool accumulate_dx = false;
  bool accumulate_dweight = false;
  bool accumulate_dbias = false;
};
template <class T>
TESSERA_API void layer_norm_backward(ThreadPool& pool, const LayerNormBackward<T>& args);

/// y = x * rstd * weight, rstd = 1 / sqrt(mean of x^2 + eps).
template <class T>
struct RmsNormForward {
  std::size_t rows = 0, width = 0;
  const T* x = nullptr;
  const T* weight = nullptr;
  Wide<T> eps = Wide<T>(1e-6);
  T* y = nullptr;
  Wide<T>* rstd = nullptr;  ///< [rows], saved for backward; may be null
};
template <class T>
TESSERA_API void rms_norm_forward(ThreadPool& pool, const RmsNormForward<T>& args);

template <class T>
struct RmsNormBackward {
  std::size_t rows = 0, width = 0;
  const T* x = nullptr;
  const T* weight = nullptr;
  const Wide<T>* rstd = nullptr;
  const T* dy = nullptr;
  T* dx = nullptr;
  T* dweight = nullptr;
  bool accumulate_dx = false;
  bool accumulate_dweight = false;
};
template <class T>
TESSERA_API void rms_norm_backward(ThreadPool& pool, const RmsNormBackward<T>& args);

}  // namespace tessera::nn::kernels
