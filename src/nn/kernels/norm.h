// Layer norm and RMS norm over the last dimension. A row's sum: 32 partial sums combined in a fixed tree. Sums over
// rows (weight and bias gradients): at most 16 row tiles, combined in order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/nn/kernels/opmath.h"
#include "tessera/nn/thread_pool.h"

namespace tessera::nn::kernels {

/// The norm of a row.
enum class RowNorm : std::uint8_t {
  layer,  ///< y = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(variance + eps), variance with 1/width
  rms     ///< y = x * rstd * weight, rstd = 1 / sqrt(mean of x^2 + eps); it has no bias and no mean
};

/// y may be x if no backward follows. mean and rstd may both be null (nothing saved).
template <class T>
struct NormForward {
  std::size_t rows = 0,             ///< rows of x and y
      width = 0;                    ///< width of a row
  const T* x = nullptr;             ///< [rows, width]
  const T* weight = nullptr;        ///< [width]
  const T* bias = nullptr;          ///< [width], or null
  OpMath<T> eps = OpMath<T>(1e-5);  ///< added to the variance or the mean of x^2
  T* y = nullptr;                   ///< [rows, width]
  OpMath<T>* mean = nullptr;        ///< [rows], saved for backward
  OpMath<T>* rstd = nullptr;        ///< [rows], saved for backward
  const T* added = nullptr;         ///< not null: [rows, width]; normalizes x + added, rounded to T, instead of x
  T* sum = nullptr;                 ///< receives x + added; null without `added`
  RowNorm norm = RowNorm::layer;    ///< which of the two
};
/// Normalizes the rows as NormForward says; ignores `added`.
template <class T>
TESSERA_API void norm_forward(ThreadPool& pool, const NormForward<T>& args);

/// Gradients that are null are not computed. dx may be dy.
template <class T>
struct NormBackward {
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
  RowNorm norm = RowNorm::layer;    ///< the same as in forward
};
/// The gradients of norm_forward().
template <class T>
TESSERA_API void norm_backward(ThreadPool& pool, const NormBackward<T>& args);

}  // namespace tessera::nn::kernels
