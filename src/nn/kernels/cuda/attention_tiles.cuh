// Building blocks of attention.cuh's kernels: tiles of rows in shared memory, and their products.
#pragma once

#include "tessera/nn/kernels/cuda/random.cuh"
#include "tessera/nn/kernels/cuda/reduce.cuh"
#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn::cuda {

using kernels::AttentionBackward;
using kernels::AttentionForward;
using kernels::AttentionShape;
using kernels::HeadsView;

/// Threads that work on one row of a tile; adjacent lanes of a warp. Each holds its part of the row's sums in
/// registers, which four threads have too few of for wide rows of f64.
template <class W, unsigned most_dim>
inline constexpr unsigned kRowThreads = sizeof(W) * most_dim <= 512 || sizeof(W) == 4 ? 4 : 16;

/// Rows per tile: so few that four tiles of W, and two squares of weights, fit in the shared memory of a block, and at
/// least as many as a row has threads.
template <class W, unsigned most_dim>
inline constexpr unsigned kTileRows = sizeof(W) * most_dim <= 256
                                          ? 64
                                          : (sizeof(W) * most_dim <= 1024 ? 64 * 256 / (sizeof(W) * most_dim) : 16);

/// Threads of a block. Kernels use up to 255 registers, and a multiprocessor has 65,536.
template <class W, unsigned most_dim>
constexpr unsigned tile_threads() {
  constexpr unsigned kThreads = kTileRows<W, most_dim> * kRowThreads<W, most_dim>;
  static_assert(kThreads <= 256 && kTileRows<W, most_dim> >= kRowThreads<W, most_dim>);
  return kThreads;
}

/// Arguments common to all attention kernels, besides their arrays.
template <class T>
struct AttentionPlan {
  std::size_t positions, heads, kv_heads, dim;
  OpMath<T> scale;
  bool causal, drops;
  Drop drop;
  PhiloxStream stream;
};
template <class T>
AttentionPlan<T> plan_of(const AttentionShape& s, const kernels::AttentionDropout& dropout) {
  const double scale = s.scale != 0 ? s.scale : 1 / std::sqrt(static_cast<double>(s.dim));
  return {s.positions,
          s.heads,
          s.kv_heads,
          s.dim,
          static_cast<OpMath<T>>(scale),
          s.causal,
          dropout.probability != 0,
          drop_of(dropout.probability),
          philox_stream(dropout.stream)};
}

/// Whether a query sees a key, whose tile may reach beyond the last position.
template <class T>
TESSERA_DEVICE bool sees(const AttentionPlan<T>& plan, std::size_t query, std::size_t key) {
  return key <= query || (!plan.causal && key < plan.positions);
}
/// The last position whose tile the queries of the tile from `first` on see.
template <class T>
TESSERA_DEVICE std::size_t last_seen(const AttentionPlan<T>& plan, std::size_t first) {
  return plan.causal ? first : plan.positions - 1;
}

/// A tile of rows in shared memory; an odd row length avoids bank conflicts between rows.
template <class W>
struct Tile {
  W* data;
  std::size_t dim;
  TESSERA_DEVICE W& at(std::size_t row, std::size_t i) const { return data[row * (dim + 1) + i]; }
};
template <class W>
constexpr std::size_t tile_elements(std::size_t rows, std::size_t dim) {
  return rows * (dim + 1);
}

/// Loads rows [first, first + rows) of one head, zero beyond the last position. All threads of the block must call it.
template <class T>
TESSERA_DEVICE void load_tile(const Tile<OpMath<T>>& tile, unsigned rows, const HeadsView<const T>& view,
                              std::size_t batch, std::size_t head, std::size_t first, std::size_t positions) {
  const T* base = view.data + batch * view.batch_stride + head * view.head_stride;
  for (std::size_t i = thread_index(); i < rows * tile.dim; i += thread_count()) {
    const std::size_t row = i / tile.dim, d = i % tile.dim;
    tile.at(row, d) =
        first + row < positions ? to_opmath(load_whole(base + (first + row) * view.position_stride + d)) : OpMath<T>(0);
  }
}

/// The random words of a sample's weights: weight (query, key) of a head has word weight_word() of weight_stream().
template <class T>
TESSERA_DEVICE PhiloxStream weight_stream(const AttentionPlan<T>& plan, std::size_t batch) {
  PhiloxStream stream = plan.stream;
  stream.high += batch;
  return stream;
}
template <class T>
TESSERA_DEVICE std::uint64_t weight_word(const AttentionPlan<T>& plan, std::size_t head, std::size_t query,
                                         std::size_t key) {
  return (head * plan.positions + query) * plan.positions + key;
}
template <class T>
TESSERA_DEVICE OpMath<T> kept_by(const AttentionPlan<T>& plan, std::uint32_t word) {
  return word < plan.drop.threshold ? OpMath<T>(0) : static_cast<OpMath<T>>(plan.drop.factor);
}
/// Word i of the block, without an array whose index is only known at run time.
TESSERA_DEVICE std::uint32_t word_of(const PhiloxBlock& block, unsigned i) {
  const std::uint32_t low = i % 2 == 0 ? block.word[0] : block.word[1];
  const std::uint32_t high = i % 2 == 0 ? block.word[2] : block.word[3];
  return i < 2 ? low : high;
}

/// Returns 0 for a dropped weight, 1 / (1 - probability) for a kept one.
template <class T>
TESSERA_DEVICE OpMath<T> kept(const AttentionPlan<T>& plan, std::size_t batch, std::size_t head, std::size_t query,
                              std::size_t key) {
  if (!plan.drops) return OpMath<T>(1);
  const std::uint64_t word = weight_word(plan, head, query, key);
  return kept_by(plan, word_of(philox_block(weight_stream(plan, batch), word / 4), word % 4));
}

/// Like kept(), of two adjacent keys, whose words mostly are in one block.
struct TwoKept {
  float first, second;
};
template <class T>
TESSERA_DEVICE TwoKept two_kept(const AttentionPlan<T>& plan, std::size_t batch, std::size_t head, std::size_t query,
                                std::size_t key) {
  const std::uint64_t word = weight_word(plan, head, query, key);
  const PhiloxStream stream = weight_stream(plan, batch);
  const PhiloxBlock block = philox_block(stream, word / 4);
  const unsigned i = word % 4;
  const std::uint32_t next = i < 3 ? word_of(block, i + 1) : philox_block(stream, word / 4 + 1).word[0];
  return {kept_by(plan, word_of(block, i)), kept_by(plan, next)};
}

/// products[j] = the product of a row of `a` with row first + j * lanes of `b`.
template <unsigned lanes, unsigned count, class W>
TESSERA_DEVICE void row_products(const Tile<W>& a, std::size_t row, const Tile<W>& b, unsigned first,
                                 W (&products)[count]) {
  for (unsigned j = 0; j < count; ++j) products[j] = 0;
  for (std::size_t d = 0; d < a.dim; ++d) {
    const W x = a.at(row, d);
    TESSERA_UNROLL
    for (unsigned j = 0; j < count; ++j) products[j] = fused(x, b.at(first + j * lanes, d), products[j]);
  }
}

/// sums[j] += the sum over rows k of weights(row, k) * b(k, first + j * lanes).
template <unsigned lanes, unsigned rows, unsigned count, class W>
TESSERA_DEVICE void add_weighted_rows(const W* weights, const Tile<W>& b, unsigned first, W (&sums)[count]) {
  for (unsigned k = 0; k < rows; ++k) {
    const W weight = weights[k];
    TESSERA_UNROLL
    for (unsigned j = 0; j < count; ++j)
      if (first + j * lanes < b.dim) sums[j] = fused(weight, b.at(k, first + j * lanes), sums[j]);
  }
}

template <unsigned lanes, class Operation, class W>
TESSERA_DEVICE W over_row(W value, Operation operation) {
  for (unsigned mask = lanes / 2; mask > 0; mask /= 2) value = operation(value, shuffle_xor(value, mask));
  return value;
}

/// The tile and head that a block works on.
struct TilePlace {
  std::size_t batch, head, first;
};
TESSERA_DEVICE TilePlace tile_place(std::size_t heads, std::size_t positions, unsigned rows) {
  const std::size_t tiles = divided_up(positions, rows);
  const std::size_t tile = block_index() % tiles, rest = block_index() / tiles;
  return {rest / heads, rest % heads, tile * rows};
}

template <unsigned lanes, class T, unsigned count>
TESSERA_DEVICE void write_row(const HeadsView<T>& view, const TilePlace& at, std::size_t position, std::size_t dim,
                              const OpMath<T> (&values)[count], bool accumulate) {
  T* out = view.data + at.batch * view.batch_stride + at.head * view.head_stride + position * view.position_stride;
  const unsigned lane = thread_index() % lanes;
  for (unsigned j = 0; j < count; ++j)
    if (lane + j * lanes < dim) add_to(out + lane + j * lanes, accumulate, values[j]);
}

}  // namespace tessera::nn::cuda
