// Softmax and cross-entropy in one pass over the logits. The backward can overwrite them, so only one such buffer
// exists.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/nn/kernels/opmath.h"
#include "tessera/nn/thread_pool.h"

namespace tessera::nn::kernels {

inline constexpr std::int32_t kIgnoreIndex = -100;

struct CrossEntropyResult {
  double loss_sum = 0;     ///< over the valid targets, in f64, in the order of the rows
  std::size_t valid = 0;   ///< targets that are not ignore_index
};

template <class T>
struct CrossEntropyForward {
  const T* logits = nullptr;              ///< [rows, vocabulary]
  const std::int32_t* targets = nullptr;  ///< [rows]; outside [0, vocabulary) and not ignore_index: InvalidUsage
  std::size_t rows = 0, vocabulary = 0;
  std::int32_t ignore_index = kIgnoreIndex;
  Wide<T>* row_max = nullptr;  ///< [rows], saved for backward; row_max and row_sum may both be null (evaluation)
  Wide<T>* row_sum = nullptr;  ///< [rows], sum of exp(logit - row_max), saved for backward
};
template <class T>
TESSERA_API CrossEntropyResult cross_entropy_forward(ThreadPool& pool, const CrossEntropyForward<T>& args);

/// dlogits = (softmax(logits) - onehot(target)) * scale, zero in ignored rows. `scale` is the gradient of loss_sum, so
/// 1 / valid for the mean. dlogits may be logits.
template <class T>
struct CrossEntropyBackward {
  const T* logits = nullptr;
  const std::int32_t* targets = nullptr;
  std::size_t rows = 0, vocabulary = 0;
  std::int32_t ignore_index = kIgnoreIndex;
  const Wide<T>* row_max = nullptr;
  const Wide<T>* row_sum = nullptr;
  Wide<T> scale = 1;
  T* dlogits = nullptr;
  bool accumulate = false;
};
template <class T>
TESSERA_API void cross_entropy_backward(ThreadPool& pool, const CrossEntropyBackward<T>& args);

/// For kernel tables: the mean over the valid targets (0 if there are none), and their number.
template <class T>
struct MeanCrossEntropy {
  CrossEntropyForward<T> rows;
  double* loss = nullptr;   ///< loss_sum / valid
  double* valid = nullptr;  ///< as a floating-point number, for the backward
};

/// The gradient of MeanCrossEntropy::loss times *upstream; ignores rows.scale.
template <class T>
struct MeanCrossEntropyBackward {
  CrossEntropyBackward<T> rows;
  const double* upstream = nullptr;
  const double* valid = nullptr;
};

}  // namespace tessera::nn::kernels
