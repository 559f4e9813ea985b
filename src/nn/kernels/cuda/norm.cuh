// Layer norm and RMS norm over the last dimension. Forward: one block per row. Weight gradients: tiles of rows whose
// sums are added in order.
#pragma once

#include "tessera/nn/kernels/cuda/reduce.cuh"
#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn::cuda {

inline constexpr unsigned kNormThreads = 256;

/// Arguments of both norms; RMS norm has no mean and no bias.
template <class T>
struct NormRows {
  std::size_t rows, width;
  const T* x;
  const T* weight;
  const T* bias;  // may be null
  OpMath<T> eps;
  T* y;
  OpMath<T>* mean;  // null: not saved
  OpMath<T>* rstd;
};

template <class T, bool centered>
TESSERA_KERNEL void norm_forward_kernel(NormRows<T> a) {
  using W = OpMath<T>;
  W* room = shared_memory<W>();
  const std::size_t row = block_index();
  const T* x = a.x + row * a.width;
  T* y = a.y + row * a.width;
  W mean = 0;
  if (centered) {
    W sum = 0;
    for (std::size_t i = thread_index(); i < a.width; i += thread_count()) sum += to_opmath(x[i]);
    mean = over_block(sum, Add{}, room) / static_cast<W>(a.width);
  }
  W squares = 0;  // around the mean, in a second pass, to avoid cancellation
  for (std::size_t i = thread_index(); i < a.width; i += thread_count()) {
    const W d = to_opmath(x[i]) - mean;
    squares = fused(d, d, squares);
  }
  const W rstd = W(1) / root(over_block(squares, Add{}, room) / static_cast<W>(a.width) + a.eps);
  for (std::size_t i = thread_index(); i < a.width; i += thread_count()) {
    const W normalized = (to_opmath(x[i]) - mean) * rstd;
    const W w = to_opmath(a.weight[i]);
    y[i] = from_opmath<T>(a.bias ? fused(normalized, w, to_opmath(a.bias[i])) : normalized * w);
  }
  if (thread_index() != 0) return;
  if (a.mean) a.mean[row] = mean;
  if (a.rstd) a.rstd[row] = rstd;
}

template <class T>
struct NormGradient {
  std::size_t rows, width;
  const T* x;
  const T* weight;
  const OpMath<T>* mean;  // null for RMS norm
  const OpMath<T>* rstd;
  const T* dy;
  T* dx;  // may be null
  bool accumulate_dx;
};

// With g = dy * weight and n the normalized row: dx = rstd (g - mean(g) - n mean(g n)); RMS norm has no mean(g).
template <class T, bool centered>
TESSERA_KERNEL void norm_backward_kernel(NormGradient<T> a) {
  using W = OpMath<T>;
  W* room = shared_memory<W>();
  const std::size_t row = block_index();
  const T* x = a.x + row * a.width;
  const T* dy = a.dy + row * a.width;
  T* dx = a.dx + row * a.width;
  const W mean = centered ? a.mean[row] : W(0), rstd = a.rstd[row];
  W sum = 0, product = 0;
  for (std::size_t i = thread_index(); i < a.width; i += thread_count()) {
    const W g = to_opmath(dy[i]) * to_opmath(a.weight[i]);
    if (centered) sum += g;
    product = fused(g, (to_opmath(x[i]) - mean) * rstd, product);
  }
  const W width = static_cast<W>(a.width);
  const W mean_g = centered ? over_block(sum, Add{}, room) / width : W(0);
  const W mean_gn = over_block(product, Add{}, room) / width;
  for (std::size_t i = thread_index(); i < a.width; i += thread_count()) {
    const W normalized = (to_opmath(x[i]) - mean) * rstd;
    const W value = rstd * fused(-normalized, mean_gn, to_opmath(dy[i]) * to_opmath(a.weight[i]) - mean_g);
    dx[i] = from_opmath<T>(a.accumulate_dx ? to_opmath(dx[i]) + value : value);
  }
}

/// Sums of dy * n and of dy over the rows of a tile, one thread per column; either may be null.
template <class T>
TESSERA_KERNEL void norm_weights_kernel(NormGradient<T> a, std::size_t tiles, OpMath<T>* dweight, OpMath<T>* dbias) {
  using W = OpMath<T>;
  const std::size_t across = divided_up(a.width, thread_count());
  const std::size_t tile = block_index() / across;
  const std::size_t column = block_index() % across * thread_count() + thread_index();
  if (column >= a.width) return;
  const std::size_t each = divided_up(a.rows, tiles);
  W weight = 0, bias = 0;
  for (std::size_t row = tile * each; row < smaller(a.rows, (tile + 1) * each); ++row) {
    const W g = to_opmath(a.dy[row * a.width + column]);
    const W mean = a.mean ? a.mean[row] : W(0);
    weight = fused(g, (to_opmath(a.x[row * a.width + column]) - mean) * a.rstd[row], weight);
    bias += g;
  }
  if (dweight) dweight[tile * a.width + column] = weight;
  if (dbias) dbias[tile * a.width + column] = bias;
}

template <class T>
struct NormWeights {
  T* dweight;
  T* dbias;
  bool accumulate_dweight, accumulate_dbias;
};

/// Scratch bytes of norm_backward.
template <class T>
std::size_t norm_scratch(std::size_t rows, std::size_t width) {
  return 2 * column_scratch(rows, width, sizeof(OpMath<T>));
}

/// Computes the weight gradients first, because dx may be dy.
template <class T, bool centered>
void norm_backward(NativeStream stream, const NormGradient<T>& a, const NormWeights<T>& to, OpMath<T>* scratch) {
  const std::size_t tiles = row_tiles(a.rows);
  OpMath<T>* dweight = to.dweight ? scratch : nullptr;
  OpMath<T>* dbias = to.dbias ? scratch + tiles * a.width : nullptr;
  const Grid columns{.blocks = divided_up(a.width, 128), .threads = 128};
  if (dweight || dbias)
    launch(stream, {.blocks = tiles * columns.blocks, .threads = 128}, norm_weights_kernel<T>, a, tiles, dweight,
           dbias);
  if (dweight)
    launch(stream, columns, combine_kernel<T>, static_cast<const OpMath<T>*>(dweight), tiles, a.width, to.dweight,
           to.accumulate_dweight);
  if (dbias)
    launch(stream, columns, combine_kernel<T>, static_cast<const OpMath<T>*>(dbias), tiles, a.width, to.dbias,
           to.accumulate_dbias);
  if (a.dx)
    launch(stream, {.blocks = a.rows, .threads = kNormThreads, .shared = kReduceRoom<OpMath<T>>},
           norm_backward_kernel<T, centered>, a);
}

template <class T, bool centered>
void norm_forward(NativeStream stream, const NormRows<T>& a) {
  launch(stream, {.blocks = a.rows, .threads = kNormThreads, .shared = kReduceRoom<OpMath<T>>},
         norm_forward_kernel<T, centered>, a);
}

}  // namespace tessera::nn::cuda
