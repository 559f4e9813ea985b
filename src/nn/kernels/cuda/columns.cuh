// Sums over the rows of a matrix, one for each column. Tiles of rows give partial sums, which are added in order, so
// the bits depend only on the shape.
#pragma once

#include <array>

#include "tessera/nn/kernels/cuda/elementwise.cuh"

namespace tessera::nn::cuda {

/// Number of row tiles, each with `across` blocks side by side; it depends only on the shape. Few tiles make their sums
/// quick to add, two blocks for each multiprocessor of an H100 fill it where a block has the whole width, and twice as
/// many where it has a part of it.
inline std::size_t row_tiles(std::size_t rows, std::size_t across = 1) {
  const std::size_t most = across == 1 ? 264 : larger<std::size_t>(1, 528 / across);
  return smaller(divided_up(rows, 16), most);
}

inline constexpr unsigned kColumnThreads = 256;
inline constexpr unsigned kColumnWarps = kColumnThreads / kWarp;

/// Columns of a block, and its shared memory: each warp's sums.
template <class T>
inline constexpr std::size_t kColumnsOfBlock = kWarp* kVector<T>;
template <class T>
inline constexpr std::size_t kColumnRoom = kColumnWarps* kColumnsOfBlock<T> * sizeof(OpMath<T>);
/// Row tiles of column_parts.
template <class T>
std::size_t column_tiles(std::size_t rows, std::size_t columns) {
  return row_tiles(rows, divided_up(columns, kColumnsOfBlock<T>));
}
/// Bytes of the partial sums of `sums` values per column.
template <class T>
std::size_t column_scratch(std::size_t rows, std::size_t columns, std::size_t sums) {
  return sums * column_tiles<T>(rows, columns) * columns * sizeof(OpMath<T>);
}

/// parts[sum, tile, column] = the sums of Body over the tile's rows. A thread adds a vector of columns in every eighth
/// row. `aligned`: all rows begin at a multiple of 16 bytes.
template <class T, class Body>
TESSERA_KERNEL void column_parts_kernel(const Body body, std::size_t rows, std::size_t columns, std::size_t tiles,
                                        bool aligned, OpMath<T>* parts) {
  using W = OpMath<T>;
  constexpr int n = kVector<T>;
  W* room = shared_memory<W>();  // [warp, column]
  const std::size_t across = divided_up(columns, kColumnsOfBlock<T>);
  const std::size_t tile = block_index() / across, first = block_index() % across * kColumnsOfBlock<T>;
  const std::size_t warp = thread_index() / kWarp, place = thread_index() % kWarp * n, column = first + place;
  const std::size_t each = divided_up(rows, tiles), end = smaller(rows, (tile + 1) * each);
  W sums[Body::kSums][n] = {};
  if (aligned && column + n <= columns) {
    TESSERA_UNROLL_BY_8
    for (std::size_t row = tile * each + warp; row < end; row += kColumnWarps)
      body.add(
          row, row * columns + column, [](const T* from) { return load<n>(from); }, sums);
  } else if (column < columns) {
    const auto guarded = [&](const T* from) { return load_part<n>(from, false, columns - column); };
    for (std::size_t row = tile * each + warp; row < end; row += kColumnWarps)
      body.add(row, row * columns + column, guarded, sums);
  }
  for (std::size_t sum = 0; sum < Body::kSums; ++sum) {
    for (int e = 0; e < n; ++e) room[warp * kColumnsOfBlock<T> + place + e] = sums[sum][e];
    sync_block();
    for (std::size_t i = thread_index(); i < kColumnsOfBlock<T> && first + i < columns; i += kColumnThreads) {
      W total = room[i];
      for (std::size_t w = 1; w < kColumnWarps; ++w) total += room[w * kColumnsOfBlock<T> + i];
      parts[(sum * tiles + tile) * columns + first + i] = total;
    }
    sync_block();
  }
}

/// Where a column's sum goes; null: nowhere.
template <class T>
struct ColumnTarget {
  T* out;
  bool accumulate;
};

/// targets[sum].out[column] = or += the sum of parts[sum, tile, column] over the tiles. A warp adds every eighth tile,
/// then one warp adds the warps' sums in order.
template <class T>
TESSERA_KERNEL void combine_kernel(const OpMath<T>* parts, std::size_t tiles, std::size_t columns,
                                   ColumnTarget<T> first, ColumnTarget<T> second) {
  using W = OpMath<T>;
  W* room = shared_memory<W>();  // [warp, column]
  const std::size_t across = divided_up(columns, kWarp), sum = block_index() / across;
  const ColumnTarget<T> target = sum == 0 ? first : second;
  if (target.out == nullptr) return;
  const std::size_t warp = thread_index() / kWarp, lane = thread_index() % kWarp;
  const std::size_t column = block_index() % across * kWarp + lane;
  W part = 0;
  if (column < columns) {
    const W* from = parts + sum * tiles * columns + column;
    TESSERA_UNROLL_BY_8
    for (std::size_t tile = warp; tile < tiles; tile += kColumnWarps) part += from[tile * columns];
  }
  room[thread_index()] = part;
  sync_block();
  if (warp != 0 || column >= columns) return;
  W total = room[lane];
  for (std::size_t w = 1; w < kColumnWarps; ++w) total += room[w * kWarp + lane];
  target.out[column] = added(target.accumulate, target.out[column], total);
}

template <class T, class Body>
void column_parts(NativeStream stream, const Body& body, std::size_t rows, std::size_t columns, bool is_aligned,
                  OpMath<T>* scratch) {
  const std::size_t tiles = column_tiles<T>(rows, columns);
  launch(
      stream,
      {.blocks = tiles * divided_up(columns, kColumnsOfBlock<T>), .threads = kColumnThreads, .shared = kColumnRoom<T>},
      column_parts_kernel<T, Body>, body, rows, columns, tiles, is_aligned && columns % kVector<T> == 0, scratch);
}
template <class T>
void combine_columns(NativeStream stream, const OpMath<T>* parts, std::size_t tiles, std::size_t columns,
                     const std::array<ColumnTarget<T>, 2>& targets) {
  const std::size_t sums = targets[1].out != nullptr ? 2 : 1;
  launch(stream,
         {.blocks = sums * divided_up(columns, kWarp),
          .threads = kColumnThreads,
          .shared = kColumnThreads * sizeof(OpMath<T>)},
         combine_kernel<T>, parts, tiles, columns, targets[0], targets[1]);
}

/// The elements themselves: a bias gradient.
template <class T>
struct ColumnValues {
  static constexpr std::size_t kSums = 1;
  const T* x;
  template <class Load, int n>
  TESSERA_DEVICE void add(std::size_t, std::size_t at, const Load& load_from, OpMath<T> (&sums)[1][n]) const {
    const Pack<T, n> values = load_from(x + at);
    TESSERA_UNROLL
    for (int e = 0; e < n; ++e) sums[0][e] += to_opmath(values.at[e]);
  }
};

/// out[column] = or += the sum of x over the rows. `scratch`: column_scratch<T>(rows, columns, 1) bytes.
template <class T>
void column_sums(NativeStream stream, const kernels::ColumnSumsArgs<T>& a, OpMath<T>* scratch) {
  column_parts<T>(stream, ColumnValues<T>{a.x}, a.rows, a.columns, aligned({a.x}), scratch);
  combine_columns<T>(stream, scratch, column_tiles<T>(a.rows, a.columns), a.columns,
                     {ColumnTarget<T>{a.out, a.accumulate}, ColumnTarget<T>{}});
}

}  // namespace tessera::nn::cuda
