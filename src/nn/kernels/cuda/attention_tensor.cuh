// Causal attention of half-precision elements on the tensor cores: the algorithm of attention.cuh (T. Dao,
// "FlashAttention-2", 2023), with products of fragments that stay in registers. A block has four warps for a tile of 64
// rows, 16 rows per warp. Sums and statistics are f32; weights and operands of the next product are rounded to the
// element type. No atomics.
//
// One rule determines which tiles are stored transposed in shared memory: a fragment of the right operand reads pairs
// that are adjacent along the summed dimension.
#pragma once

#include "tessera/nn/kernels/cuda/attention_tiles.cuh"
#include "tessera/nn/kernels/cuda/fragments.cuh"

namespace tessera::nn::cuda {

inline constexpr unsigned kTensorRows = 64;  // per tile
inline constexpr unsigned kTensorThreads = 128;
/// Maximum head size in elements; attention.cuh handles larger heads.
inline constexpr std::size_t kTensorDim = 128;

template <class T, unsigned width>
inline constexpr std::size_t kRowsTile = sizeof(T) * kTensorRows*(width + kFragmentPadding);
template <class T, unsigned width>
inline constexpr std::size_t kColumnsTile = sizeof(T) * width*(kTensorRows + kFragmentPadding);

/// Loads rows [first, first + 64) of a head: unchanged to `rows`, transposed to `columns`; either may be null. Zero
/// beyond the last position and beyond the head. All threads of the block must call it.
template <class T, unsigned width>
TESSERA_DEVICE void load_tensor_tile(T* rows, T* columns, const HeadsView<const T>& view, const TilePlace& at,
                                     std::size_t dim, std::size_t positions) {
  const T* base = view.data + at.batch * view.batch_stride + at.head * view.head_stride;
  const bool whole = dim % 8 == 0 && view.position_stride % 8 == 0 && reinterpret_cast<std::uintptr_t>(base) % 16 == 0;
  for (unsigned i = thread_index(); i < kTensorRows * width / 8; i += kTensorThreads) {
    const unsigned row = i % kTensorRows, d = i / kTensorRows * 8;  // adjacent lanes write to different banks
    const std::size_t position = at.first + row;
    Eight<T> values = {};
    if (position < positions) {
      const T* from = base + position * view.position_stride + d;
      if (whole) {
        if (d < dim) values = *reinterpret_cast<const Eight<T>*>(from);
      } else {
        for (unsigned e = 0; e < 8; ++e)
          if (d + e < dim) values.v[e] = from[e];
      }
    }
    if (rows != nullptr) *reinterpret_cast<Eight<T>*>(rows + row * (width + kFragmentPadding) + d) = values;
    if (columns != nullptr)
      for (unsigned e = 0; e < 8; ++e) columns[(d + e) * (kTensorRows + kFragmentPadding) + row] = values.v[e];
  }
}

/// Sixteen columns of (rows of `a` starting at the warp's first row) x (rows of `b` starting at `first`), over `width`:
/// two accumulators.
template <class T, unsigned width>
TESSERA_DEVICE void sixteen_products(const T* a, const T* b, unsigned first, Accumulator (&sums)[2]) {
  constexpr unsigned kLine = width + kFragmentPadding;
  sums[0] = sums[1] = {};
  TESSERA_UNROLL
  for (unsigned k = 0; k < width; k += 16) {
    const LeftFragment left = left_fragment(a + warp_index() * 16 * kLine + k, kLine);
    for (unsigned half = 0; half < 2; ++half)
      multiply_add<T>(sums[half], left, right_fragment(b + (first + half * 8) * kLine + k, kLine));
  }
}

/// sums += (the weights of sixteen rows of the sum, as left operand) x (rows `first` to `first` + 16, read from
/// `columns`).
template <class T, unsigned width>
TESSERA_DEVICE void add_products(const LeftFragment& weights, const T* columns, unsigned first,
                                 Accumulator (&sums)[width / 8]) {
  constexpr unsigned kLine = kTensorRows + kFragmentPadding;
  TESSERA_UNROLL
  for (unsigned n = 0; n < width / 8; ++n)
    multiply_add<T>(sums[n], weights, right_fragment(columns + n * 8 * kLine + first, kLine));
}

/// Row `half` * 8 of the warp's fragment, relative to the tile.
TESSERA_DEVICE unsigned fragment_row(unsigned half) { return warp_index() * 16 + lane_group() + half * 8; }

/// Writes the warp's 16 rows of sums, multiplied by factor[0] and factor[1] (for the fragment's first and last eight
/// rows).
template <class T, unsigned width>
TESSERA_DEVICE void write_tensor_rows(const HeadsView<T>& view, const TilePlace& at, std::size_t positions,
                                      std::size_t dim, const Accumulator (&sums)[width / 8], const float (&factor)[2],
                                      bool accumulate) {
  for (unsigned half = 0; half < 2; ++half) {
    const std::size_t position = at.first + fragment_row(half);
    if (position >= positions) continue;
    T* out = view.data + at.batch * view.batch_stride + at.head * view.head_stride + position * view.position_stride;
    TESSERA_UNROLL
    for (unsigned n = 0; n < width / 8; ++n)
      for (unsigned e = 0; e < 2; ++e) {
        const unsigned d = n * 8 + lane_pair() * 2 + e;
        if (d < dim) out[d] = added(accumulate, out[d], sums[n].v[half * 2 + e] * factor[half]);
      }
  }
}

template <class T, unsigned width>
TESSERA_KERNEL void tensor_forward_kernel(AttentionForward<T> a, AttentionPlan<T> plan) {
  const TilePlace at = tile_place(plan.heads, plan.positions, kTensorRows);
  const std::size_t kv_head = at.head / (plan.heads / plan.kv_heads);
  T* q = shared_memory<T>();
  T* k = q + kRowsTile<T, width> / sizeof(T);
  T* v = k + kRowsTile<T, width> / sizeof(T);
  load_tensor_tile<T, width>(q, nullptr, a.q, at, plan.dim, plan.positions);
  float max[2] = {minus_infinity<float>(), minus_infinity<float>()}, sum[2] = {};
  Accumulator result[width / 8] = {};
  for (std::size_t first = 0; first <= at.first; first += kTensorRows) {
    sync_block();  // all threads have finished reading the previous tiles
    load_tensor_tile<T, width>(k, nullptr, a.k, {at.batch, kv_head, first}, plan.dim, plan.positions);
    load_tensor_tile<T, width>(nullptr, v, a.v, {at.batch, kv_head, first}, plan.dim, plan.positions);
    sync_block();
    Accumulator scores[4][2];
    float most[2] = {max[0], max[1]};
    TESSERA_UNROLL
    for (unsigned c = 0; c < 4; ++c) {
      sixteen_products<T, width>(q, k, c * 16, scores[c]);
      for (unsigned i = 0; i < 8; ++i) {
        const std::size_t key = first + c * 16 + accumulator_column(i), query = at.first + fragment_row(i % 4 / 2);
        float& score = scores[c][i / 4].v[i % 4];
        score = key <= query ? score * plan.scale : minus_infinity<float>();
        most[i % 4 / 2] = larger(most[i % 4 / 2], score);
      }
    }
    float shrink[2], more[2] = {};
    for (unsigned half = 0; half < 2; ++half) {
      most[half] = over_row<4>(most[half], Largest{});
      shrink[half] = exponential(max[half] - most[half]);
      max[half] = most[half];
    }
    for (unsigned n = 0; n < width / 8; ++n)
      for (unsigned e = 0; e < 4; ++e) result[n].v[e] *= shrink[e / 2];
    TESSERA_UNROLL
    for (unsigned c = 0; c < 4; ++c) {
      for (unsigned i = 0; i < 8; ++i) {
        const unsigned half = i % 4 / 2;
        const std::size_t key = first + c * 16 + accumulator_column(i), query = at.first + fragment_row(half);
        const float weight = exponential(scores[c][i / 4].v[i % 4] - max[half]);  // exp(-infinity) is 0 here
        more[half] += weight;
        scores[c][i / 4].v[i % 4] = key <= query ? weight * kept(plan, at.batch, at.head, query, key) : 0.0F;
      }
      add_products<T, width>(as_left<T>(scores[c]), v, c * 16, result);
    }
    for (unsigned half = 0; half < 2; ++half) sum[half] = fused(sum[half], shrink[half], over_row<4>(more[half], Add{}));
  }
  const float factor[2] = {1.0F / sum[0], 1.0F / sum[1]};
  write_tensor_rows<T, width>(a.out, at, plan.positions, plan.dim, result, factor, false);
  for (unsigned half = 0; half < 2; ++half) {
    const std::size_t query = at.first + fragment_row(half);
    if (a.log_sum_exp && lane_pair() == 0 && query < plan.positions)
      a.log_sum_exp[(at.batch * plan.heads + at.head) * plan.positions + query] = max[half] + logf(sum[half]);
  }
}

/// weight = exp(score * scale - log_sum_exp) and the gradient of the score, for pairs within the causal mask; zero for
/// others.
template <class T>
TESSERA_DEVICE void weight_and_gradient(const AttentionBackward<T>& a, const AttentionPlan<T>& plan, const float* delta,
                                        const TilePlace& head, std::size_t query, std::size_t key, float& score,
                                        float& product) {
  float weight = 0, gradient = 0;
  if (key <= query && query < plan.positions) {
    const std::size_t statistic = (head.batch * plan.heads + head.head) * plan.positions + query;
    const float factor = kept(plan, head.batch, head.head, query, key);
    weight = exponential(score * plan.scale - a.log_sum_exp[statistic]);
    gradient = weight * plan.scale * (product * factor - delta[statistic]);
    weight *= factor;
  }
  score = weight;
  product = gradient;
}

/// dq; one block per tile of queries.
template <class T, unsigned width>
TESSERA_KERNEL void tensor_dq_kernel(AttentionBackward<T> a, AttentionPlan<T> plan, const float* delta) {
  const TilePlace at = tile_place(plan.heads, plan.positions, kTensorRows);
  const std::size_t kv_head = at.head / (plan.heads / plan.kv_heads);
  constexpr std::size_t kRows = kRowsTile<T, width> / sizeof(T);
  T* q = shared_memory<T>();
  T *dout = q + kRows, *k = q + 2 * kRows, *v = q + 3 * kRows, *k_columns = q + 4 * kRows;
  load_tensor_tile<T, width>(q, nullptr, a.q, at, plan.dim, plan.positions);
  load_tensor_tile<T, width>(dout, nullptr, a.dout, at, plan.dim, plan.positions);
  Accumulator result[width / 8] = {};
  for (std::size_t first = 0; first <= at.first; first += kTensorRows) {
    sync_block();
    load_tensor_tile<T, width>(k, k_columns, a.k, {at.batch, kv_head, first}, plan.dim, plan.positions);
    load_tensor_tile<T, width>(v, nullptr, a.v, {at.batch, kv_head, first}, plan.dim, plan.positions);
    sync_block();
    for (unsigned c = 0; c < 4; ++c) {
      Accumulator scores[2], products[2];
      sixteen_products<T, width>(q, k, c * 16, scores);
      sixteen_products<T, width>(dout, v, c * 16, products);
      for (unsigned i = 0; i < 8; ++i)
        weight_and_gradient(a, plan, delta, at, at.first + fragment_row(i % 4 / 2),
                            first + c * 16 + accumulator_column(i), scores[i / 4].v[i % 4], products[i / 4].v[i % 4]);
      add_products<T, width>(as_left<T>(products), k_columns, c * 16, result);
    }
  }
  const float factor[2] = {1, 1};
  write_tensor_rows<T, width>(a.dq, at, plan.positions, plan.dim, result, factor, a.accumulate_dq);
}

/// dk and dv; one block per tile of keys, over all queries of all heads that read them, in order. Scores are computed
/// transposed, so that weights can be used directly as the left operand.
template <class T, unsigned width>
TESSERA_KERNEL void tensor_dkv_kernel(AttentionBackward<T> a, AttentionPlan<T> plan, const float* delta) {
  const TilePlace at = tile_place(plan.kv_heads, plan.positions, kTensorRows);
  const std::size_t group = plan.heads / plan.kv_heads;
  constexpr std::size_t kRows = kRowsTile<T, width> / sizeof(T), kColumns = kColumnsTile<T, width> / sizeof(T);
  T* k = shared_memory<T>();
  T *v = k + kRows, *q = k + 2 * kRows, *dout = k + 3 * kRows, *q_columns = k + 4 * kRows,
    *dout_columns = q_columns + kColumns;
  load_tensor_tile<T, width>(k, nullptr, a.k, at, plan.dim, plan.positions);
  load_tensor_tile<T, width>(v, nullptr, a.v, at, plan.dim, plan.positions);
  Accumulator dk[width / 8] = {}, dv[width / 8] = {};
  for (std::size_t head = at.head * group; head < (at.head + 1) * group; ++head) {
    for (std::size_t first = at.first; first < plan.positions; first += kTensorRows) {
      const TilePlace queries{at.batch, head, first};
      sync_block();
      load_tensor_tile<T, width>(q, q_columns, a.q, queries, plan.dim, plan.positions);
      load_tensor_tile<T, width>(dout, dout_columns, a.dout, queries, plan.dim, plan.positions);
      sync_block();
      for (unsigned c = 0; c < 4; ++c) {
        Accumulator scores[2], products[2];
        sixteen_products<T, width>(k, q, c * 16, scores);
        sixteen_products<T, width>(v, dout, c * 16, products);
        for (unsigned i = 0; i < 8; ++i)
          weight_and_gradient(a, plan, delta, queries, first + c * 16 + accumulator_column(i),
                              at.first + fragment_row(i % 4 / 2), scores[i / 4].v[i % 4], products[i / 4].v[i % 4]);
        add_products<T, width>(as_left<T>(scores), dout_columns, c * 16, dv);
        add_products<T, width>(as_left<T>(products), q_columns, c * 16, dk);
      }
    }
  }
  const float factor[2] = {1, 1};
  write_tensor_rows<T, width>(a.dk, at, plan.positions, plan.dim, dk, factor, a.accumulate_dk);
  write_tensor_rows<T, width>(a.dv, at, plan.positions, plan.dim, dv, factor, a.accumulate_dv);
}

template <class T>
constexpr bool on_matrix_units(const AttentionShape& s) {
  return sizeof(T) == 2 && s.dim <= kTensorDim;
}

/// Calls function(integral constant) with 64 or 128.
template <class Function>
void for_tensor_dim(std::size_t dim, Function function) {
  if (dim <= 64) return function(std::integral_constant<unsigned, 64>{});
  return function(std::integral_constant<unsigned, 128>{});
}

template <class T>
void tensor_forward(NativeStream stream, const AttentionForward<T>& a) {
  const std::size_t tiles = a.shape.batch * a.shape.heads * divided_up(a.shape.positions, kTensorRows);
  for_tensor_dim(a.shape.dim, [&](auto width) {
    launch(stream,
           {.blocks = tiles, .threads = kTensorThreads, .shared = 2 * kRowsTile<T, width()> + kColumnsTile<T, width()>},
           tensor_forward_kernel<T, width()>, a, plan_of<T>(a.shape, a.dropout));
  });
}

/// `delta`: the output of attention_delta_kernel.
template <class T>
void tensor_backward(NativeStream stream, const AttentionBackward<T>& a, const AttentionPlan<T>& plan,
                     const float* delta) {
  const std::size_t tiles = a.shape.batch * divided_up(a.shape.positions, kTensorRows);
  for_tensor_dim(a.shape.dim, [&](auto width) {
    constexpr std::size_t kRows = kRowsTile<T, width()>, kColumns = kColumnsTile<T, width()>;
    launch(stream, {.blocks = tiles * a.shape.kv_heads, .threads = kTensorThreads, .shared = 4 * kRows + 2 * kColumns},
           tensor_dkv_kernel<T, width()>, a, plan, delta);
    launch(stream, {.blocks = tiles * a.shape.heads, .threads = kTensorThreads, .shared = 4 * kRows + kColumns},
           tensor_dq_kernel<T, width()>, a, plan, delta);
  });
}

}  // namespace tessera::nn::cuda
