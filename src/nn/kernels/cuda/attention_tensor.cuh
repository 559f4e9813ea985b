// Causal attention of half-precision elements on the tensor cores: the algorithm of attention.cuh (T. Dao,
// "FlashAttention-2", 2023), with products of fragments whose weights stay in registers. Sums and statistics are f32;
// weights and operands of the next product are rounded to the element type. No atomic sums.
//
// All tiles lie in shared memory as rows of positions; fragments of the transposed ones are transposed as they are
// loaded. A tile is loaded while the previous one is used.
#pragma once

#include "tessera/nn/kernels/cuda/attention_tiles.cuh"
#include "tessera/nn/kernels/cuda/fragments.cuh"
#include "tessera/nn/kernels/cuda/math.cuh"

namespace tessera::nn::cuda {

/// Positions per block: of queries in the forward, of keys in the backward ...
inline constexpr unsigned kBlockRows = 128;
/// ... and per step of a block: of keys in the forward, of queries in the backward.
inline constexpr unsigned kStepRows = 64;
/// Maximum head size in elements; attention.cuh handles larger heads.
inline constexpr std::size_t kTensorDim = 128;

/// Elements from one row of a tile to the next.
template <unsigned width>
inline constexpr unsigned kTileLine = width + kFragmentPadding;

/// The tile and head of a block by its number. Later tiles of a head come first: in the forward they take the longest.
TESSERA_DEVICE TilePlace last_tile_first(std::size_t number, std::size_t heads, std::size_t positions) {
  const std::size_t tiles = divided_up(positions, kBlockRows);
  const std::size_t tile = tiles - 1 - number % tiles, rest = number / tiles;
  return {rest / heads, rest % heads, tile * kBlockRows};
}

template <class T>
TESSERA_DEVICE T* head_at(const HeadsView<T>& view, std::size_t batch, std::size_t head) {
  return view.data + batch * view.batch_stride + head * view.head_stride;
}

/// Loads what begin_load() can't copy 16 bytes at a time.
template <unsigned width, unsigned rows, unsigned threads, class T>
TESSERA_DEVICE void load_elements(T* tile, const T* base, const HeadsView<const T>& view, std::size_t first,
                                  const AttentionPlan<T>& plan) {
  TESSERA_NO_UNROLL
  for (unsigned i = thread_index(); i < rows * width; i += threads) {
    const std::size_t position = first + i / width;
    const unsigned d = i % width;
    const bool inside = position < plan.positions && d < plan.dim;
    tile[i / width * kTileLine<width> + d] = inside ? load_whole(base + position * view.position_stride + d) : T{};
  }
}

/// Begins to load rows [at.first, at.first + rows) of a head to a tile: zeros beyond the last position and beyond the
/// head. All `threads` of the block must call it.
template <unsigned width, unsigned rows, unsigned threads, class T>
TESSERA_DEVICE void begin_load(T* tile, const HeadsView<const T>& view, const TilePlace& at,
                               const AttentionPlan<T>& plan) {
  constexpr unsigned kParts = width / 8, kStride = threads / kParts;  // parts of a row, of 16 bytes; rows at a time
  static_assert(rows % kStride == 0);
  const T* const base = head_at(view, at.batch, at.head);
  if (plan.dim % 8 != 0 || view.position_stride % 8 != 0 || reinterpret_cast<std::uintptr_t>(base) % 16 != 0)
    return load_elements<width, rows, threads>(tile, base, view, at.first, plan);
  const unsigned row = thread_index() / kParts, d = thread_index() % kParts * 8;
  const std::size_t first = at.first + row;
  TESSERA_UNROLL
  for (unsigned i = 0; i < rows; i += kStride) {
    const bool inside = first + i < plan.positions && d < plan.dim;
    copy_async(tile + (row + i) * kTileLine<width> + d, inside ? base + (first + i) * view.position_stride + d : base,
               inside);
  }
}

/// sums += (rows of `a`) x (rows of `b`)^T, over `width`: 16 * tiles rows and `columns` columns of the result.
template <unsigned width, unsigned tiles, unsigned columns, class T>
TESSERA_DEVICE void add_row_products(const T* a, const T* b, Accumulator (&sums)[tiles][columns / 8]) {
  constexpr unsigned kLine = kTileLine<width>;
  TESSERA_UNROLL
  for (unsigned k = 0; k < width; k += 16) {
    LeftFragment left[tiles];
    TESSERA_UNROLL
    for (unsigned m = 0; m < tiles; ++m) left[m] = left_fragment(a + m * 16 * kLine + k, kLine);
    TESSERA_UNROLL
    for (unsigned n = 0; n < columns; n += 16) {
      const RightFragments right = right_fragments_of_columns(b + n * kLine + k, kLine);
      TESSERA_UNROLL
      for (unsigned m = 0; m < tiles; ++m)
        for (unsigned half = 0; half < 2; ++half) multiply_add<T>(sums[m][n / 8 + half], left[m], right.v[half]);
    }
  }
}

/// sums += weights x (rows of `b`).
template <unsigned width, class T, unsigned tiles, unsigned steps>
TESSERA_DEVICE void add_weighted_rows(const LeftFragment (&weights)[tiles][steps], const T* b,
                                      Accumulator (&sums)[tiles][width / 8]) {
  constexpr unsigned kLine = kTileLine<width>;
  TESSERA_UNROLL
  for (unsigned k = 0; k < steps; ++k) {
    TESSERA_UNROLL
    for (unsigned n = 0; n < width; n += 16) {
      const RightFragments right = right_fragments(b + k * 16 * kLine + n, kLine);
      TESSERA_UNROLL
      for (unsigned m = 0; m < tiles; ++m)
        for (unsigned half = 0; half < 2; ++half) multiply_add<T>(sums[m][n / 8 + half], weights[m][k], right.v[half]);
    }
  }
}

/// Sums as the left operand of the next product.
template <class T, unsigned tiles, unsigned steps>
TESSERA_DEVICE void round_to_left(const Accumulator (&sums)[tiles][2 * steps], LeftFragment (&left)[tiles][steps]) {
  TESSERA_UNROLL
  for (unsigned m = 0; m < tiles; ++m)
    for (unsigned k = 0; k < steps; ++k) left[m][k] = as_left<T>(sums[m][2 * k], sums[m][2 * k + 1]);
}

/// Row and column of element e of accumulator [m][n], relative to the first of the warp's.
TESSERA_DEVICE unsigned sum_row(unsigned m, unsigned e) { return m * 16 + lane_group() + e / 2 * 8; }
TESSERA_DEVICE unsigned sum_column(unsigned n, unsigned e) { return n * 8 + lane_pair() * 2 + e % 2; }

/// Writes two adjacent elements of a head, of which `left` remain.
template <class T>
TESSERA_DEVICE void write_pair(T* at, unsigned left, bool accumulate, float low, float high) {
  if (left >= 2 && reinterpret_cast<std::uintptr_t>(at) % 4 == 0) {
    if (accumulate) {
      low += to_opmath(load_whole(at));
      high += to_opmath(load_whole(at + 1));
    }
    store_whole(reinterpret_cast<std::uint32_t*>(at), packed<T>(low, high));
    return;
  }
  if (left >= 1) add_to(at, accumulate, low);
  if (left >= 2) add_to(at + 1, accumulate, high);
}

/// Where a warp writes its sums: rows from `first`, elements from `dim_first`, each multiplied by factor[m][e / 2].
struct SumsPlace {
  std::size_t batch, head, first;
  unsigned dim_first;
  bool accumulate;
};
template <class T, unsigned tiles, unsigned columns>
TESSERA_DEVICE void write_sums(const HeadsView<T>& view, const SumsPlace& at, const AttentionPlan<T>& plan,
                               const Accumulator (&sums)[tiles][columns], const float (&factor)[tiles][2]) {
  T* const base = head_at(view, at.batch, at.head);
  TESSERA_UNROLL
  for (unsigned m = 0; m < tiles; ++m)
    for (unsigned half = 0; half < 2; ++half) {
      const std::size_t position = at.first + sum_row(m, half * 2);
      if (position >= plan.positions) continue;
      T* const row = base + position * view.position_stride;
      TESSERA_UNROLL
      for (unsigned n = 0; n < columns; ++n) {
        const unsigned d = at.dim_first + sum_column(n, 0);
        if (d < plan.dim)
          write_pair(row + d, static_cast<unsigned>(plan.dim) - d, at.accumulate,
                     sums[m][n].v[half * 2] * factor[m][half], sums[m][n].v[half * 2 + 1] * factor[m][half]);
      }
    }
}

/// Causal attention in half precision, where heads fit and the largest score has the largest product.
template <class T>
constexpr bool on_matrix_units(const AttentionShape& s) {
  return sizeof(T) == 2 && s.causal && s.dim <= kTensorDim && s.scale >= 0;
}

/// Calls function(width, drops) with constants: a width of 64 or 128 that fits a head, and whether weights are dropped.
template <class Function>
void for_tensor_kernel(std::size_t dim, bool drops, Function function) {
  const auto with_width = [&](auto width) {
    if (drops) return function(width, std::true_type{});
    function(width, std::false_type{});
  };
  if (dim <= 64) return with_width(std::integral_constant<unsigned, 64>{});
  with_width(std::integral_constant<unsigned, 128>{});
}

}  // namespace tessera::nn::cuda
