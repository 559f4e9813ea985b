// Softmax and cross-entropy, one block per row; one block computes the mean over the valid rows in a fixed order.
#pragma once

#include "tessera/nn/kernels/cuda/math.cuh"
#include "tessera/nn/kernels/cuda/reduce.cuh"
#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn::cuda {

inline constexpr unsigned kLossThreads = 256;

/// losses[row] = -log softmax(logits[row])[target]; 0 for an ignored row, NaN for a target outside the vocabulary.
template <class T>
TESSERA_KERNEL void cross_entropy_kernel(kernels::CrossEntropyForward<T> a, double* losses) {
  using W = OpMath<T>;
  W* room = shared_memory<W>();
  const std::size_t row = block_index();
  const std::int32_t target = a.targets[row];
  if (target == a.ignore_index) {  // the same for the whole block
    if (thread_index() == 0) losses[row] = 0;
    return;
  }
  const T* x = a.logits + row * a.vocabulary;
  W max = minus_infinity<W>();
  for (std::size_t i = thread_index(); i < a.vocabulary; i += thread_count()) max = larger(max, to_opmath(x[i]));
  max = over_block(max, Largest{}, room);
  W sum = 0;
  for (std::size_t i = thread_index(); i < a.vocabulary; i += thread_count()) sum += exponential(to_opmath(x[i]) - max);
  sum = over_block(sum, Add{}, room);
  if (thread_index() != 0) return;
  const bool known = target >= 0 && static_cast<std::size_t>(target) < a.vocabulary;
  losses[row] =
      known ? log(static_cast<double>(sum)) - (static_cast<double>(to_opmath(x[target])) - static_cast<double>(max))
            : not_a_number(0.0);
  if (a.row_max) a.row_max[row] = max;
  if (a.row_sum) a.row_sum[row] = sum;
}

/// loss = the mean of losses over the targets that are not ignored, valid = their number.
TESSERA_PLAIN_KERNEL void mean_loss_kernel(const double* losses, const std::int32_t* targets, std::size_t rows,
                                           std::int32_t ignored, double* result) {
  double* room = shared_memory<double>();
  double sum = 0, count = 0;
  for (std::size_t row = thread_index(); row < rows; row += thread_count()) {
    sum += losses[row];
    count += targets[row] == ignored ? 0 : 1;
  }
  sum = over_block(sum, Add{}, room);
  count = over_block(count, Add{}, room);
  if (thread_index() != 0) return;
  result[0] = count == 0 ? 0 : sum / count;
  result[1] = count;
}

/// Copies result[0] to *loss and result[1] to *valid.
TESSERA_PLAIN_KERNEL void hand_out_kernel(const double* result, double* loss, double* valid) {
  if (thread_index() == 0) *loss = result[0];
  if (thread_index() == 1) *valid = result[1];
}

inline std::size_t cross_entropy_scratch(std::size_t rows) { return (rows + 2) * sizeof(double); }

/// `scratch`: cross_entropy_scratch(rows) bytes.
template <class T>
void cross_entropy_forward(NativeStream stream, const kernels::MeanCrossEntropy<T>& a, double* scratch) {
  const std::size_t rows = a.rows.rows;
  launch(stream, {.blocks = rows, .threads = kLossThreads, .shared = kReduceRoom<OpMath<T>>}, cross_entropy_kernel<T>,
         a.rows, scratch);
  launch(stream, {.blocks = 1, .threads = 256, .shared = kReduceRoom<double>}, mean_loss_kernel,
         static_cast<const double*>(scratch), a.rows.targets, rows, a.rows.ignore_index, scratch + rows);
  launch(stream, {.blocks = 1, .threads = 32}, hand_out_kernel, static_cast<const double*>(scratch + rows), a.loss,
         a.valid);
}

template <class T>
TESSERA_KERNEL void cross_entropy_backward_kernel(kernels::MeanCrossEntropyBackward<T> a) {
  using W = OpMath<T>;
  const kernels::CrossEntropyBackward<T>& rows = a.rows;
  const std::size_t row = block_index();
  const std::int32_t target = rows.targets[row];
  const bool ignored = target == rows.ignore_index;
  const W scale = *a.valid == 0 ? W(0) : static_cast<W>(*a.upstream / *a.valid);
  const W max = ignored ? W(0) : rows.row_max[row], factor = ignored ? W(0) : scale / rows.row_sum[row];
  const T* x = rows.logits + row * rows.vocabulary;
  T* dx = rows.dlogits + row * rows.vocabulary;
  for (std::size_t i = thread_index(); i < rows.vocabulary; i += thread_count()) {
    W value = 0;
    if (!ignored) {
      value = factor * exponential(to_opmath(x[i]) - max);
      if (static_cast<std::int32_t>(i) == target) value -= scale;
    }
    dx[i] = from_opmath<T>(rows.accumulate ? to_opmath(dx[i]) + value : value);
  }
}
template <class T>
void cross_entropy_backward(NativeStream stream, const kernels::MeanCrossEntropyBackward<T>& a) {
  launch(stream, {.blocks = a.rows.rows, .threads = kLossThreads}, cross_entropy_backward_kernel<T>, a);
}

}  // namespace tessera::nn::cuda
