// Sums over a block of threads, in an order that depends only on the block size.
#pragma once

#include "tessera/nn/kernels/cuda/portable.cuh"
#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn::cuda {

struct Add {
  template <class W>
  TESSERA_DEVICE W operator()(W a, W b) const {
    return a + b;
  }
};
struct Largest {
  template <class W>
  TESSERA_DEVICE W operator()(W a, W b) const {
    return larger(a, b);
  }
};

/// Combines the lanes' values; returns the result in every lane. All lanes use the same tree since both operations
/// commute.
template <class W, class Operation>
TESSERA_DEVICE W over_warp(W value, Operation operation) {
  TESSERA_UNROLL
  for (unsigned mask = kWarp / 2; mask > 0; mask /= 2) value = operation(value, shuffle_xor(value, mask));
  return value;
}

/// Combines the threads' values; returns the result in every thread. `room`: 32 values of shared memory for exclusive
/// use during the call. All threads of the block must call it; the block consists of whole warps.
template <class W, class Operation>
TESSERA_DEVICE W over_block(W value, Operation operation, W* room) {
  value = over_warp(value, operation);
  const unsigned warp = thread_index() / kWarp, warps = thread_count() / kWarp;
  if (thread_index() % kWarp == 0) room[warp] = value;
  sync_block();
  W total = room[0];
  for (unsigned w = 1; w < warps; ++w) total = operation(total, room[w]);
  sync_block();
  return total;
}

/// Shared memory bytes of over_block.
template <class W>
inline constexpr std::size_t kReduceRoom = kWarp * sizeof(W);

/// Partial results of the infinity norm combine by the maximum, where NaN counts as the largest; those of other norms
/// by addition.
struct LargestOrNaN {
  TESSERA_DEVICE double operator()(double a, double b) const { return b > a || b != b ? b : a; }
};
template <class Operation>
TESSERA_DEVICE double over_threads(const double* in, std::size_t count, Operation operation) {
  double total = 0;
  for (std::size_t i = thread_index(); i < count; i += thread_count()) total = operation(total, in[i]);
  return over_block(total, operation, shared_memory<double>());
}

/// Adds one element to a partial result of a norm.
TESSERA_DEVICE double add_to_norm(kernels::Norm norm, double part, double value) {
  const double magnitude = value < 0 ? -value : value;
  switch (norm) {
    case kernels::Norm::one:
      return part + magnitude;
    case kernels::Norm::two:
      return fused(value, value, part);
    case kernels::Norm::three:
      return fused(value * value, magnitude, part);
    default:
      return LargestOrNaN{}(part, magnitude);
  }
}

/// Elements per partial result of a norm, which is computed in f64.
inline constexpr std::size_t kNormTile = 16384;
template <class T>
TESSERA_KERNEL void norm_kernel(kernels::Norm norm, const T* x, std::size_t count, double* tiles) {
  const std::size_t begin = block_index() * kNormTile;
  const std::size_t end = smaller(count, begin + kNormTile);
  double part = 0;
  for (std::size_t i = begin + thread_index(); i < end; i += thread_count())
    part = add_to_norm(norm, part, static_cast<double>(to_opmath(x[i])));
  part = norm == kernels::Norm::infinity ? over_block(part, LargestOrNaN{}, shared_memory<double>())
                                         : over_block(part, Add{}, shared_memory<double>());
  if (thread_index() == 0) tiles[block_index()] = part;
}

/// out[0] = the combined partial results in[count]; one block: each thread combines every 256th, then the block.
TESSERA_PLAIN_KERNEL void norm_total_kernel(kernels::Norm norm, const double* in, std::size_t count, double* out) {
  const double total =
      norm == kernels::Norm::infinity ? over_threads(in, count, LargestOrNaN{}) : over_threads(in, count, Add{});
  if (thread_index() == 0) out[0] = total;
}

inline std::size_t norm_scratch(std::size_t count) { return divided_up(count, kNormTile) * sizeof(double); }

/// `scratch`: norm_scratch(count) bytes.
template <class T>
void norm_part(NativeStream stream, kernels::Norm norm, const T* x, std::size_t count, double* scratch, double* out) {
  const std::size_t tiles = divided_up(count, kNormTile);
  launch(stream, {.blocks = tiles, .threads = 256, .shared = kReduceRoom<double>}, norm_kernel<T>, norm, x, count,
         scratch);
  launch(stream, {.blocks = 1, .threads = 256, .shared = kReduceRoom<double>}, norm_total_kernel, norm,
         static_cast<const double*>(scratch), tiles, out);
}

/// out[column] = or += the sum over `tiles` rows of parts[tile, column], in order.
template <class T>
TESSERA_KERNEL void combine_kernel(const OpMath<T>* parts, std::size_t tiles, std::size_t columns, T* out,
                                   bool accumulate) {
  const std::size_t column = block_index() * thread_count() + thread_index();
  if (column >= columns) return;
  OpMath<T> sum = 0;
  for (std::size_t tile = 0; tile < tiles; ++tile) sum += parts[tile * columns + column];
  out[column] = from_opmath<T>(accumulate ? to_opmath(out[column]) + sum : sum);
}

/// Number of row tiles of a kernel that sums over rows; it depends only on the shape.
inline std::size_t row_tiles(std::size_t rows) { return smaller<std::size_t>(divided_up(rows, 16), 264); }
inline std::size_t column_scratch(std::size_t rows, std::size_t columns, std::size_t element_bytes) {
  return row_tiles(rows) * columns * element_bytes;
}

/// parts[tile, column] = the sum of x over the tile's rows; one thread per column.
template <class T>
TESSERA_KERNEL void column_parts_kernel(const T* x, std::size_t rows, std::size_t columns, std::size_t tiles,
                                        OpMath<T>* parts) {
  const std::size_t across = divided_up(columns, thread_count());
  const std::size_t tile = block_index() / across;
  const std::size_t column = block_index() % across * thread_count() + thread_index();
  if (column >= columns) return;
  const std::size_t each = divided_up(rows, tiles);
  OpMath<T> sum = 0;
  for (std::size_t row = tile * each; row < smaller(rows, (tile + 1) * each); ++row)
    sum += to_opmath(x[row * columns + column]);
  parts[tile * columns + column] = sum;
}

/// out[column] = or += the sum of x over the rows: a bias gradient. `scratch`: column_scratch() bytes of Wide<T>.
template <class T>
void column_sums(NativeStream stream, const kernels::ColumnSumsArgs<T>& a, OpMath<T>* scratch) {
  const std::size_t tiles = row_tiles(a.rows);
  launch(stream, {.blocks = tiles * divided_up(a.columns, 128), .threads = 128}, column_parts_kernel<T>, a.x, a.rows,
         a.columns, tiles, scratch);
  launch(stream, {.blocks = divided_up(a.columns, 128), .threads = 128}, combine_kernel<T>,
         static_cast<const OpMath<T>*>(scratch), tiles, a.columns, a.out, a.accumulate);
}

}  // namespace tessera::nn::cuda
