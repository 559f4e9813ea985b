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
  std::size_t rows = 0,             ///< rows of x and y
      width = 0;                    ///< width of a row
  const T* x = nullptr;             ///< [rows, width]
  const T* weight = nullptr;        ///< [width]
  const T* bias = nullptr;          ///< [width], or null
  OpMath<T> eps = OpMath<T>(1e-5);  ///< added to the variance
  T* y = nullptr;                   ///< [rows, width]
  OpMath<T>* mean = nullptr;        ///< [rows], saved for backward
  OpMath<T>* rstd = nullptr;        ///< [rows], saved for backward
  const T* added = nullptr;         ///< not null: [rows, width]; normalizes x + added, rounded to T, instead of x
  T* sum = nullptr;                 ///< receives x + added; null without `added`
};
/// Normalizes the rows as LayerNormForward says; ignores `added`.
template <class T>
TESSERA_API void layer_norm_forward(ThreadPool& pool, const LayerNormForward<T>& args);

/// Gradients that are null are not computed. dx may be dy.
template <class T>
struct LayerNormBackward {
  std::size_t rows = 0,             ///< the same as in forward
      width = 0;                    ///< the same as in forward
  const T* x = nullptr;             ///< the same as in forward
  const T* weight = nullptr;        ///< the same as in forward
  const OpMath<T>* mean = nullptr;  ///< value that forward saved
  const OpMath<T>* rstd = nullptr;  ///< value that forward saved
  const T* dy = nullptr;            ///< [rows, width], gradient of y
  T* dx = nullptr;                  ///< gradient of x, or null
  T* dweight = nullptr;             ///< gradient of weight, or null
  T* dbias = nullptr;               ///< gradient of bias, or null
  bool accumulate_dx = false;       ///< true: dx += ...
  bool accumulate_dweight = false;  ///< true: dweight += ...
  bool accumulate_dbias = false;    ///< true: dbias += ...
};
/// The gradients of layer_norm_forward().
template <class T>
TESSERA_API void layer_norm_backward(ThreadPool& pool, const LayerNormBackward<T>& args);

/// y = x * rstd * weight, rstd = 1 / sqrt(mean of x^2 + eps).
template <class T>
struct RmsNormForward {
  std::size_t rows = 0,             ///< rows of x and y
      width = 0;                    ///< width of a row
  const T* x = nullptr;             ///< [rows, width]
  const T* weight = nullptr;        ///< [width]
  OpMath<T> eps = OpMath<T>(1e-6);  ///< added to the mean of x^2
  T* y = nullptr;                   ///< [rows, width]
  OpMath<T>* rstd = nullptr;        ///< [rows], saved for backward; may be null
  const T* added = nullptr;         ///< the same as in LayerNormForward
  T* sum = nullptr;                 ///< the same as in LayerNormForward
};
/// Normalizes the rows as RmsNormForward says; ignores `added`.
template <class T>
TESSERA_API void rms_norm_forward(ThreadPool& pool, const RmsNormForward<T>& args);

/// The same as LayerNormBackward, for rms_norm_forward().
template <class T>
struct RmsNormBackward {
  std::size_t rows = 0,             ///< the same as in forward
      width = 0;                    ///< the same as in forward
  const T* x = nullptr;             ///< the same as in forward
  const T* weight = nullptr;        ///< the same as in forward
  const OpMath<T>* rstd = nullptr;  ///< value that forward saved
  const T* dy = nullptr;            ///< [rows, width], gradient of y
  T* dx = nullptr;                  ///< gradient of x, or null
  T* dweight = nullptr;             ///< gradient of weight, or null
  bool accumulate_dx = false;       ///< true: dx += ...
  bool accumulate_dweight = false;  ///< true: dweight += ...
};
/// The gradients of rms_norm_forward().
template <class T>
TESSERA_API void rms_norm_backward(ThreadPool& pool, const RmsNormBackward<T>& args);

}  // namespace tessera::nn::kernels
