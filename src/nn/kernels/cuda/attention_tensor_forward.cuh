// The forward of attention_tensor.cuh. A block has four warps for 128 queries, 32 per warp, so that each fragment of
// keys and values that a warp loads serves two products. The statistics of a row belong to the four lanes that hold its
// scores, so they stay in registers.
#pragma once

#include "tessera/nn/kernels/cuda/attention_tensor.cuh"

namespace tessera::nn::cuda {

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
