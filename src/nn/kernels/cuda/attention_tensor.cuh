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

// The forward. A block has four warps for 128 queries, 32 per warp, so that each fragment of keys and values that a
// warp loads serves two products. The statistics of a row belong to the four lanes that hold its scores, so they stay
// in registers.

inline constexpr unsigned kForwardThreads = 128;
inline constexpr unsigned kForwardTiles = kBlockRows / 16 / (kForwardThreads / kWarp);  // of 16 rows, per warp

/// Keys per step, of which the scores fit in registers beside the result (and random numbers).
template <unsigned width, bool drops>
inline constexpr unsigned kForwardKeys = 4096 / width / (drops ? 2 : 1);

/// Shared memory: the queries, and two stages of keys and values.
template <class T, unsigned width, bool drops>
inline constexpr std::size_t kForwardShared = sizeof(T) * kTileLine<width>*(kBlockRows +
                                                                            4 * kForwardKeys<width, drops>);

/// The rows of a warp. Scores are in the products' own unit; `max` is the largest score, `sum` the lane's part of the
/// sum of the weights.
template <unsigned width>
struct ForwardRows {
  Accumulator result[kForwardTiles][width / 8] = {};
  float max[kForwardTiles][2], sum[kForwardTiles][2] = {};
};

template <unsigned columns>
using Scores = Accumulator[kForwardTiles][columns];

/// The scores of keys from `key` on, for queries from `query` on: none for later keys than the query.
template <unsigned columns>
TESSERA_DEVICE void mask_scores(Scores<columns>& scores, unsigned key, unsigned query) {
  TESSERA_UNROLL
  for (unsigned m = 0; m < kForwardTiles; ++m)
    for (unsigned n = 0; n < columns; ++n)
      for (unsigned e = 0; e < 4; ++e)
        if (key + sum_column(n, e) > query + sum_row(m, e)) scores[m][n].v[e] = minus_infinity<float>();
}

/// Scales the row's sums to the largest of all scores so far, and the scores to weights relative to it. `unit`: a score
/// of 1 as an exponent of 2.
template <unsigned width, unsigned columns>
TESSERA_DEVICE void weights_of(Scores<columns>& scores, ForwardRows<width>& rows, float unit) {
  TESSERA_UNROLL
  for (unsigned m = 0; m < kForwardTiles; ++m)
    for (unsigned half = 0; half < 2; ++half) {
      float& max = rows.max[m][half];
      float most = max;
      for (unsigned n = 0; n < columns; ++n)
        most = fmaxf(most, fmaxf(scores[m][n].v[half * 2], scores[m][n].v[half * 2 + 1]));
      most = over_row<4>(most, [](float a, float b) { return fmaxf(a, b); });
      const float shrink = fast_exp2((max - most) * unit), shift = most * unit;
      max = most;
      float sum = rows.sum[m][half] * shrink;
      for (unsigned n = 0; n < columns; ++n)
        for (unsigned e = half * 2; e < half * 2 + 2; ++e) {
          scores[m][n].v[e] = fast_exp2(fused(scores[m][n].v[e], unit, -shift));
          sum += scores[m][n].v[e];
        }
      rows.sum[m][half] = sum;
      for (unsigned n = 0; n < width / 8; ++n)
        for (unsigned e = half * 2; e < half * 2 + 2; ++e) rows.result[m][n].v[e] *= shrink;
    }
}

template <class T, unsigned columns>
TESSERA_DEVICE void drop_weights(Scores<columns>& weights, const AttentionPlan<T>& plan, const TilePlace& at,
                                 unsigned key, unsigned query) {
  TESSERA_UNROLL
  for (unsigned i = 0; i < kForwardTiles * columns * 2; ++i) {
    const unsigned m = i / (columns * 2), n = i / 2 % columns, e = i % 2 * 2;
    const TwoKept factors = two_kept(plan, at.batch, at.head, query + sum_row(m, e), key + sum_column(n, e));
    weights[m][n].v[e] *= factors.first;
    weights[m][n].v[e + 1] *= factors.second;
  }
}

template <class T, unsigned width>
TESSERA_DEVICE void finish_forward(const AttentionForward<T>& a, const AttentionPlan<T>& plan, const TilePlace& at,
                                   ForwardRows<width>& rows, unsigned query) {
  float factor[kForwardTiles][2];
  TESSERA_UNROLL
  for (unsigned m = 0; m < kForwardTiles; ++m)
    for (unsigned half = 0; half < 2; ++half) {
      const float sum = over_row<4>(rows.sum[m][half], Add{});
      factor[m][half] = 1.0F / sum;
      const std::size_t position = query + sum_row(m, half * 2);
      if (a.log_sum_exp && lane_pair() == 0 && position < plan.positions)
        a.log_sum_exp[(at.batch * plan.heads + at.head) * plan.positions + position] =
            fused(rows.max[m][half], plan.scale, logf(sum));
    }
  write_sums(a.out, {at.batch, at.head, query, 0, false}, plan, rows.result, factor);
}

template <class T, unsigned width, bool drops>
TESSERA_KERNEL void tensor_forward_kernel(AttentionForward<T> a, AttentionPlan<T> plan) {
  constexpr unsigned kLine = kTileLine<width>, kKeys = kForwardKeys<width, drops>;
  const TilePlace at = last_tile_first(block_index(), plan.heads, plan.positions);
  const std::size_t kv_head = at.head / (plan.heads / plan.kv_heads);
  T* q = shared_memory<T>();
  T* stages = q + kBlockRows * kLine;
  const auto load_keys = [&](unsigned stage, std::size_t first) {
    T* const k = stages + stage * 2 * kKeys * kLine;
    begin_load<width, kKeys, kForwardThreads>(k, a.k, {at.batch, kv_head, first}, plan);
    begin_load<width, kKeys, kForwardThreads>(k + kKeys * kLine, a.v, {at.batch, kv_head, first}, plan);
  };
  begin_load<width, kBlockRows, kForwardThreads>(q, a.q, at, plan);
  load_keys(0, 0);
  commit_copies();
  const unsigned row = warp_index() * 16 * kForwardTiles, query = static_cast<unsigned>(at.first) + row;
  const auto end = static_cast<unsigned>(smaller(plan.positions, at.first + kBlockRows));
  ForwardRows<width> rows;
  for (auto& max : rows.max) max[0] = max[1] = minus_infinity<float>();
  for (unsigned first = 0, stage = 0; first < end; first += kKeys, stage ^= 1) {
    wait_copies<0>();
    sync_block();  // this stage is complete, and no thread uses the other one any longer
    if (first + kKeys < end) load_keys(stage ^ 1, first + kKeys);
    commit_copies();
    if (first >= query + 16 * kForwardTiles) continue;  // later than all queries of the warp
    const T* const k = stages + stage * 2 * kKeys * kLine;
    Scores<kKeys / 8> scores = {};
    add_row_products<width, kForwardTiles, kKeys>(q + row * kLine, k, scores);
    if (first + kKeys > query + 1) mask_scores(scores, first, query);
    weights_of(scores, rows, plan.scale * kLog2E);
    if constexpr (drops) drop_weights(scores, plan, at, first, query);
    LeftFragment weights[kForwardTiles][kKeys / 16];
    round_to_left<T>(scores, weights);
    add_weighted_rows<width>(weights, k + kKeys * kLine, rows.result);
  }
  finish_forward(a, plan, at, rows, query);
}

template <class T>
void tensor_forward(NativeStream stream, const AttentionForward<T>& a) {
  const std::size_t tiles = a.shape.batch * a.shape.heads * divided_up(a.shape.positions, kBlockRows);
  for_tensor_kernel(a.shape.dim, a.dropout.probability != 0, [&](auto width, auto drops) {
    launch(stream, {.blocks = tiles, .threads = kForwardThreads, .shared = kForwardShared<T, width(), drops()>},
           tensor_forward_kernel<T, width(), drops()>, a, plan_of<T>(a.shape, a.dropout));
  });
}

}  // namespace tessera::nn::cuda
