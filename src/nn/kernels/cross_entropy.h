// Softmax and cross-entropy in one pass over the logits. The backward can overwrite them, so only one such buffer
// exists.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/nn/kernels/opmath.h"
#include "tessera/nn/thread_pool.h"

namespace tessera::nn::kernels {

/// Default of ignore_index, as in PyTorch: targets of this value have no loss and no gradient.
inline constexpr std::int32_t kIgnoreIndex = -100;

/// The result of cross_entropy_forward().
struct CrossEntropyResult {
  double loss_sum = 0;    ///< over the valid targets, in f64, in the order of the rows
  std::size_t valid = 0;  ///< targets that are not ignore_index
};

/// Arguments of cross_entropy_forward().
template <class T>
struct CrossEntropyForward {
  const T* logits = nullptr;                 ///< [rows, vocabulary]
  const std::int32_t* targets = nullptr;     ///< [rows]; outside [0, vocabulary) and not ignore_index: InvalidUsage
  std::size_t rows = 0,                      ///< targets
      vocabulary = 0;                        ///< classes
  std::int32_t ignore_index = kIgnoreIndex;  ///< targets that are skipped
  OpMath<T>* row_max = nullptr;  ///< [rows], saved for backward; row_max and row_sum may both be null (evaluation)
  OpMath<T>* row_sum = nullptr;  ///< [rows], sum of exp(logit - row_max), saved for backward
  std::size_t stride = 0;        ///< elements between the starts of two rows of logits; 0: packed
};
/// The loss -log softmax(logits[row])[target], summed over the rows.
template <class T>
TESSERA_API CrossEntropyResult cross_entropy_forward(ThreadPool& pool, const CrossEntropyForward<T>& args);

/// dlogits = (softmax(logits) - onehot(target)) * scale, zero in ignored rows. `scale` is the gradient of loss_sum, so
/// 1 / valid for the mean. dlogits may be logits. Elements between the rows of dlogits become zero, or stay unchanged
/// with `accumulate`.
template <class T>
struct CrossEntropyBackward {
  const T* logits = nullptr;                 ///< the same as in forward
  const std::int32_t* targets = nullptr;     ///< the same as in forward
  std::size_t rows = 0,                      ///< the same as in forward
      vocabulary = 0;                        ///< the same as in forward
  std::int32_t ignore_index = kIgnoreIndex;  ///< the same as in forward
  const OpMath<T>* row_max = nullptr;        ///< value that forward saved
  const OpMath<T>* row_sum = nullptr;        ///< value that forward saved
  OpMath<T> scale = 1;                       ///< gradient of loss_sum
  T* dlogits = nullptr;                      ///< [rows, vocabulary]
  bool accumulate = false;                   ///< true: dlogits += ...
  std::size_t stride = 0;  ///< elements between the starts of two rows of logits and of dlogits; 0: packed
};
/// The stride of a CrossEntropyForward or CrossEntropyBackward, or the length of a packed row.
template <class Args>
requires requires(Args args) { args.vocabulary; }
constexpr std::size_t row_stride(const Args& args) { return args.stride != 0 ? args.stride : args.vocabulary; }
/// The gradient of cross_entropy_forward().
template <class T>
TESSERA_API void cross_entropy_backward(ThreadPool& pool, const CrossEntropyBackward<T>& args);

/// The mean over the valid targets (0 if there are none), and their number, for kernel tables.
template <class T>
struct MeanCrossEntropy {
  CrossEntropyForward<T> rows;  ///< input of the sum
  double* loss = nullptr;       ///< loss_sum / valid
  double* valid = nullptr;      ///< their number as a floating-point number, for the backward
};

/// The gradient of MeanCrossEntropy::loss times *upstream; ignores rows.scale.
template <class T>
struct MeanCrossEntropyBackward {
  CrossEntropyBackward<T> rows;      ///< input; its `scale` is ignored
  const double* upstream = nullptr;  ///< gradient of the loss, in device memory
  const double* valid = nullptr;     ///< MeanCrossEntropy::valid
};

}  // namespace tessera::nn::kernels
