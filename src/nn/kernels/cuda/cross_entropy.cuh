// Softmax and cross-entropy, one block per row; one block computes the mean over the valid rows in a fixed order.
//
// The logits are by far the largest matrix of a step. Forward reads them once: each thread keeps the largest logit so
// far and the sum relative to it. Backward, which alone knows the gradient of the loss, reads them once more and
// overwrites them.
#pragma once

#include <limits>

#include "tessera/nn/kernels/cuda/elementwise.cuh"
#include "tessera/nn/kernels/cuda/reduce.cuh"
#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn::cuda {

inline constexpr unsigned kLossThreads = 256;
/// Vectors that a thread loads before it uses the first.
inline constexpr int kLossAhead = 4;

/// exp(x - shift). For half precision by the hardware's power of two: its error, 2^-22, is far below that of the
/// rounded results, and the host's polynomial would take longer than the memory does.
template <class T>
struct ShiftedExponential {
  OpMath<T> shift;
  TESSERA_DEVICE OpMath<T> operator()(OpMath<T> x) const {
    if constexpr (sizeof(T) < 4)
      return fast_exp2((x - shift) * kLog2E);
    else
      return exponential(x - shift);
  }
};

/// The largest of some logits, and the sum of exp(logit - max).
template <class T>
struct OnlineSoftmax {
  using W = OpMath<T>;
  W max = std::numeric_limits<W>::lowest();  // finite, so that -infinity - max is never NaN
  W sum = 0;

  template <int count>
  TESSERA_DEVICE void add(const W (&x)[count]) {
    W most = max;
    TESSERA_UNROLL
    for (int i = 0; i < count; ++i) most = maximum(most, x[i]);
    const ShiftedExponential<T> power{most};
    sum *= power(max);
    TESSERA_UNROLL
    for (int i = 0; i < count; ++i) sum += power(x[i]);  // NaN, which the maximum ignores, stays in the sum
    max = most;
  }
  /// Adds vectors of n elements, `apart` elements from each other.
  template <int vectors, int n>
  TESSERA_DEVICE void add_vectors(const T* x, std::size_t apart) {
    Pack<T, n> in[vectors];
    TESSERA_UNROLL
    for (int v = 0; v < vectors; ++v) in[v] = load<n>(x + static_cast<std::size_t>(v) * apart);
    W values[vectors * n];
    TESSERA_UNROLL
    for (int i = 0; i < vectors * n; ++i) values[i] = to_opmath(in[i / n].at[i % n]);
    add(values);
  }
};

/// losses[row] = -log softmax(logits[row])[target]; 0 for an ignored row, NaN for a target outside the vocabulary.
template <class T, int n>
TESSERA_KERNEL void cross_entropy_kernel(kernels::CrossEntropyForward<T> a, double* losses) {
  using W = OpMath<T>;
  W* room = shared_memory<W>();
  const std::size_t row = block_index();
  const std::int32_t target = a.targets[row];
  if (target == a.ignore_index) {  // the same for the whole block
    if (thread_index() == 0) losses[row] = 0;
    return;
  }
  const T* x = a.logits + row * row_stride(a);
  const std::size_t vectors = a.vocabulary / n, threads = thread_count();
  OnlineSoftmax<T> part;
  std::size_t v = thread_index();
  for (; v + (kLossAhead - 1) * threads < vectors; v += kLossAhead * threads)
    part.template add_vectors<kLossAhead, n>(x + v * n, threads * n);
  for (; v < vectors; v += threads) part.template add_vectors<1, n>(x + v * n, 0);
  if (vectors * n + thread_index() < a.vocabulary) part.template add_vectors<1, 1>(x + vectors * n + thread_index(), 0);
  const W max = over_block(part.max, Largest{}, room);
  const W sum = over_block(part.sum * ShiftedExponential<T>{max}(part.max), Add{}, room);
  if (thread_index() != 0) return;
  const bool known = target >= 0 && static_cast<std::size_t>(target) < a.vocabulary;
  losses[row] =
      known ? log(static_cast<double>(sum)) - (static_cast<double>(to_opmath(x[target])) - static_cast<double>(max))
            : not_a_number(0.0);
  if (a.row_max) a.row_max[row] = max;
  if (a.row_sum) a.row_sum[row] = sum;
}

/// *loss = the mean of losses over the targets that are not ignored, *valid = their number; one block.
TESSERA_PLAIN_KERNEL void mean_loss_kernel(const double* losses, const std::int32_t* targets, std::size_t rows,
                                           std::int32_t ignored, double* loss, double* valid) {
  double* room = shared_memory<double>();
  double sum = 0, count = 0;
  for (std::size_t row = thread_index(); row < rows; row += thread_count()) {
    sum += losses[row];
    count += targets[row] == ignored ? 0 : 1;
  }
  sum = over_block(sum, Add{}, room);
  count = over_block(count, Add{}, room);
  if (thread_index() != 0) return;
  *loss = count == 0 ? 0 : sum / count;
  *valid = count;
}

inline std::size_t cross_entropy_scratch(std::size_t rows) { return rows * sizeof(double); }

/// True if all rows can be loaded and stored by 16 bytes.
template <class T>
bool wide_rows(std::initializer_list<const void*> matrices, std::size_t stride) {
  return aligned(matrices) && stride % kVector<T> == 0;
}

/// `scratch`: cross_entropy_scratch(rows) bytes.
template <class T>
void cross_entropy_forward(NativeStream stream, const kernels::MeanCrossEntropy<T>& a, double* scratch) {
  const std::size_t rows = a.rows.rows;
  const bool wide = wide_rows<T>({a.rows.logits}, row_stride(a.rows));
  launch(stream, {.blocks = rows, .threads = kLossThreads, .shared = kReduceRoom<OpMath<T>>},
         wide ? cross_entropy_kernel<T, kVector<T>> : cross_entropy_kernel<T, 1>, a.rows, scratch);
  launch(stream, {.blocks = 1, .threads = 1024, .shared = kReduceRoom<double>}, mean_loss_kernel,
         static_cast<const double*>(scratch), a.rows.targets, rows, a.rows.ignore_index, a.loss, a.valid);
}

/// The gradient of a row's logits.
template <class T>
struct LogitGradient {
  using W = OpMath<T>;
  ShiftedExponential<T> power;
  W factor;            ///< scale / sum of the powers
  W scale;             ///< gradient of the row's loss
  std::size_t target;  ///< a column, or none

  /// Vectors of n columns, `apart` columns from each other, of which the first begins at `column`; all are loaded
  /// before the first is stored.
  template <int vectors, int n, bool accumulate>
  TESSERA_DEVICE void write(const T* x, T* dx, std::size_t column, std::size_t apart) const {
    Pack<T, n> in[vectors], out[vectors];
    TESSERA_UNROLL
    for (int v = 0; v < vectors; ++v) {
      const std::size_t first = column + static_cast<std::size_t>(v) * apart;
      in[v] = load<n>(x + first);
      if constexpr (accumulate) out[v] = load<n>(static_cast<const T*>(dx) + first);
    }
    TESSERA_UNROLL
    for (int v = 0; v < vectors; ++v) {
      const std::size_t first = column + static_cast<std::size_t>(v) * apart;
      W values[n];
      TESSERA_UNROLL
      for (int e = 0; e < n; ++e) values[e] = factor * power(to_opmath(in[v].at[e]));
      if (target - first < static_cast<std::size_t>(n)) {  // in one vector of the row; false if the target is before it
        TESSERA_UNROLL
        for (int e = 0; e < n; ++e)
          values[e] = first + static_cast<std::size_t>(e) == target ? values[e] - scale : values[e];
      }
      TESSERA_UNROLL
      for (int e = 0; e < n; ++e)
        out[v].at[e] = from_opmath<T>(accumulate ? to_opmath(out[v].at[e]) + values[e] : values[e]);
      store<n>(dx + first, out[v]);
    }
  }
};

template <class T, int n, bool accumulate>
TESSERA_KERNEL void cross_entropy_backward_kernel(kernels::MeanCrossEntropyBackward<T> a) {
  using W = OpMath<T>;
  const kernels::CrossEntropyBackward<T>& rows = a.rows;
  const std::size_t row = block_index(), stride = row_stride(rows), threads = thread_count();
  const std::int32_t target = rows.targets[row];
  const T* x = rows.logits + row * stride;
  T* dx = rows.dlogits + row * stride;
  if (target == rows.ignore_index) {  // the same for the whole block
    if constexpr (!accumulate)
      for (std::size_t v = thread_index(); v < stride / n; v += threads) store<n>(dx + v * n, Pack<T, n>{});
    return;
  }
  const W scale = *a.valid == 0 ? W(0) : static_cast<W>(*a.upstream / *a.valid);
  const LogitGradient<T> gradient{
      {rows.row_max[row]}, scale / rows.row_sum[row], scale, static_cast<std::size_t>(target)};
  const std::size_t vectors = rows.vocabulary / n;
  std::size_t v = thread_index();
  for (; v + (kLossAhead - 1) * threads < vectors; v += kLossAhead * threads)
    gradient.template write<kLossAhead, n, accumulate>(x, dx, v * n, threads * n);
  for (; v < vectors; v += threads) gradient.template write<1, n, accumulate>(x, dx, v * n, 0);
  for (std::size_t i = vectors * n + thread_index(); i < stride; i += threads) {
    if (i < rows.vocabulary)
      gradient.template write<1, 1, accumulate>(x, dx, i, 0);
    else if (!accumulate)
      dx[i] = from_opmath<T>(0);
  }
}

template <class T, int n>
void cross_entropy_backward(NativeStream stream, const kernels::MeanCrossEntropyBackward<T>& a) {
  launch(stream, {.blocks = a.rows.rows, .threads = kLossThreads},
         a.rows.accumulate ? cross_entropy_backward_kernel<T, n, true> : cross_entropy_backward_kernel<T, n, false>, a);
}
template <class T>
void cross_entropy_backward(NativeStream stream, const kernels::MeanCrossEntropyBackward<T>& a) {
  if (wide_rows<T>({a.rows.logits, a.rows.dlogits}, row_stride(a.rows)))
    cross_entropy_backward<T, kVector<T>>(stream, a);
  else
    cross_entropy_backward<T, 1>(stream, a);
}

}  // namespace tessera::nn::cuda
