// Attention with grouped-query heads: online softmax over tiles of keys (T. Dao et al., "FlashAttention", 2022)
// on the ordinary arithmetic units, for every element type and heads of at most 256 elements. Uses no buffer of size
// positions^2 and no atomics. It is this device's reference; attention_tensor.cuh handles half precision.
#pragma once

#include "tessera/nn/kernels/cuda/attention_tensor.cuh"
#include "tessera/nn/kernels/cuda/attention_tensor_backward.cuh"
#include "tessera/nn/kernels/cuda/attention_tiles.cuh"

namespace tessera::nn::cuda {

template <class T, unsigned most_dim>
TESSERA_KERNEL void attention_forward_kernel(AttentionForward<T> a, AttentionPlan<T> plan) {
  using W = OpMath<T>;
  constexpr unsigned kRows = kTileRows<W, most_dim>, kLanes = kRowThreads<W, most_dim>;
  constexpr unsigned kKeys = kRows / kLanes, kColumns = most_dim / kLanes;
  const TilePlace at = tile_place(plan.heads, plan.positions, kRows);
  const std::size_t kv_head = at.head / (plan.heads / plan.kv_heads), size = tile_elements<W>(kRows, plan.dim);
  W* shared = shared_memory<W>();
  const Tile<W> q{shared, plan.dim}, k{shared + size, plan.dim}, v{shared + 2 * size, plan.dim};
  const unsigned row = thread_index() / kLanes, lane = thread_index() % kLanes;
  W* weights = shared + 3 * size + row * (kRows + 1);
  const std::size_t query = at.first + row;
  W max = minus_infinity<W>(), sum = 0, result[kColumns] = {};
  load_tile<T>(q, kRows, a.q, at.batch, at.head, at.first, plan.positions);
  for (std::size_t first = 0; first <= last_seen(plan, at.first); first += kRows) {
    sync_block();  // all threads have finished reading the previous tiles
    load_tile<T>(k, kRows, a.k, at.batch, kv_head, first, plan.positions);
    load_tile<T>(v, kRows, a.v, at.batch, kv_head, first, plan.positions);
    sync_block();
    W scores[kKeys], step_max = max, step_sum = 0;
    row_products<kLanes>(q, row, k, lane, scores);
    for (unsigned j = 0; j < kKeys; ++j) {
      scores[j] = sees(plan, query, first + lane + j * kLanes) ? scores[j] * plan.scale : minus_infinity<W>();
      step_max = larger(step_max, scores[j]);
    }
    step_max = over_row<kLanes>(step_max, Largest{});
    for (unsigned j = 0; j < kKeys; ++j) {
      const std::size_t key = first + lane + j * kLanes;
      const W weight = exponential(scores[j] - step_max);  // exp(-infinity) is 0 here
      step_sum += weight;
      weights[lane + j * kLanes] = sees(plan, query, key) ? weight * kept(plan, at.batch, at.head, query, key) : W(0);
    }
    const W shrink = exponential(max - step_max);
    sum = fused(sum, shrink, over_row<kLanes>(step_sum, Add{}));
    max = step_max;
    for (unsigned j = 0; j < kColumns; ++j) result[j] *= shrink;
    sync_block();  // the weights of the row are complete
    add_weighted_rows<kLanes, kRows>(weights, v, lane, result);
  }
  if (query >= plan.positions) return;
  T* out = a.out.data + at.batch * a.out.batch_stride + at.head * a.out.head_stride + query * a.out.position_stride;
  for (unsigned j = 0; j < kColumns; ++j)
    if (lane + j * kLanes < plan.dim) store_whole(out + lane + j * kLanes, from_opmath<T>(result[j] / sum));
  if (a.log_sum_exp && lane == 0)
    a.log_sum_exp[(at.batch * plan.heads + at.head) * plan.positions + query] = max + static_cast<W>(log(sum));
}

/// delta[batch, head, position] = the product of out and dout; one warp per row.
template <class T>
TESSERA_KERNEL void attention_delta_kernel(AttentionBackward<T> a, AttentionPlan<T> plan, std::size_t rows,
                                           OpMath<T>* delta) {
  const std::size_t row = block_index() * (thread_count() / kWarp) + thread_index() / kWarp;
  const std::size_t inside = row < rows ? row : rows - 1;  // the sum needs whole warps
  const std::size_t position = inside % plan.positions, head = inside / plan.positions % plan.heads;
  const std::size_t batch = inside / plan.positions / plan.heads;
  const auto of = [&](const HeadsView<const T>& view) {
    return view.data + batch * view.batch_stride + head * view.head_stride + position * view.position_stride;
  };
  const T* out = of(a.out);
  const T* dout = of(a.dout);
  OpMath<T> sum = 0;
  for (std::size_t d = thread_index() % kWarp; d < plan.dim; d += kWarp)
    sum = fused(to_opmath(load_whole(out + d)), to_opmath(load_whole(dout + d)), sum);
  sum = over_warp(sum, Add{});
  if (row < rows && thread_index() % kWarp == 0) delta[row] = sum;
}

/// dq; one block per tile of queries.
template <class T, unsigned most_dim>
TESSERA_KERNEL void attention_dq_kernel(AttentionBackward<T> a, AttentionPlan<T> plan, const OpMath<T>* delta) {
  using W = OpMath<T>;
  constexpr unsigned kRows = kTileRows<W, most_dim>, kLanes = kRowThreads<W, most_dim>;
  constexpr unsigned kKeys = kRows / kLanes, kColumns = most_dim / kLanes;
  const TilePlace at = tile_place(plan.heads, plan.positions, kRows);
  const std::size_t kv_head = at.head / (plan.heads / plan.kv_heads), size = tile_elements<W>(kRows, plan.dim);
  W* shared = shared_memory<W>();
  const Tile<W> q{shared, plan.dim}, dout{shared + size, plan.dim}, k{shared + 2 * size, plan.dim},
      v{shared + 3 * size, plan.dim};
  const unsigned row = thread_index() / kLanes, lane = thread_index() % kLanes;
  W* ds = shared + 4 * size + row * (kRows + 1);
  const std::size_t query = at.first + row;
  const std::size_t statistic = (at.batch * plan.heads + at.head) * plan.positions + smaller(query, plan.positions - 1);
  const W shift = a.log_sum_exp[statistic], mean = delta[statistic];
  W result[kColumns] = {};
  load_tile<T>(q, kRows, a.q, at.batch, at.head, at.first, plan.positions);
  load_tile<T>(dout, kRows, a.dout, at.batch, at.head, at.first, plan.positions);
  for (std::size_t first = 0; first <= last_seen(plan, at.first); first += kRows) {
    sync_block();
    load_tile<T>(k, kRows, a.k, at.batch, kv_head, first, plan.positions);
    load_tile<T>(v, kRows, a.v, at.batch, kv_head, first, plan.positions);
    sync_block();
    W scores[kKeys], products[kKeys];
    row_products<kLanes>(q, row, k, lane, scores);
    row_products<kLanes>(dout, row, v, lane, products);
    for (unsigned j = 0; j < kKeys; ++j) {
      const std::size_t key = first + lane + j * kLanes;
      W value = 0;
      if (sees(plan, query, key) && query < plan.positions) {
        const W weight = exponential(scores[j] * plan.scale - shift);
        value = weight * plan.scale * (products[j] * kept(plan, at.batch, at.head, query, key) - mean);
      }
      ds[lane + j * kLanes] = value;
    }
    sync_block();
    add_weighted_rows<kLanes, kRows>(ds, k, lane, result);
  }
  if (query < plan.positions) write_row<kLanes>(a.dq, at, query, plan.dim, result, a.accumulate_dq);
}

/// dk and dv; one block per tile of keys, over all queries of all heads that read them, in order.
template <class T, unsigned most_dim>
TESSERA_KERNEL void attention_dkv_kernel(AttentionBackward<T> a, AttentionPlan<T> plan, const OpMath<T>* delta) {
  using W = OpMath<T>;
  constexpr unsigned kRows = kTileRows<W, most_dim>, kLanes = kRowThreads<W, most_dim>;
  constexpr unsigned kQueries = kRows / kLanes, kColumns = most_dim / kLanes;
  const TilePlace at = tile_place(plan.kv_heads, plan.positions, kRows);
  const std::size_t group = plan.heads / plan.kv_heads, size = tile_elements<W>(kRows, plan.dim);
  W* shared = shared_memory<W>();
  const Tile<W> q{shared, plan.dim}, dout{shared + size, plan.dim}, k{shared + 2 * size, plan.dim},
      v{shared + 3 * size, plan.dim};
  const unsigned row = thread_index() / kLanes, lane = thread_index() % kLanes;
  W* p = shared + 4 * size + row * (kRows + 1);
  W* ds = p + kRows * (kRows + 1);
  const std::size_t key = at.first + row;
  W dk[kColumns] = {}, dv[kColumns] = {};
  load_tile<T>(k, kRows, a.k, at.batch, at.head, at.first, plan.positions);
  load_tile<T>(v, kRows, a.v, at.batch, at.head, at.first, plan.positions);
  for (std::size_t head = at.head * group; head < (at.head + 1) * group; ++head) {
    for (std::size_t first = plan.causal ? at.first : 0; first < plan.positions; first += kRows) {
      sync_block();
      load_tile<T>(q, kRows, a.q, at.batch, head, first, plan.positions);
      load_tile<T>(dout, kRows, a.dout, at.batch, head, first, plan.positions);
      sync_block();
      W scores[kQueries], products[kQueries];
      row_products<kLanes>(k, row, q, lane, scores);
      row_products<kLanes>(v, row, dout, lane, products);
      for (unsigned j = 0; j < kQueries; ++j) {
        const std::size_t query = first + lane + j * kLanes;
        W weight = 0, factor = 0, mean = 0;
        if (sees(plan, query, key) && query < plan.positions) {
          const std::size_t statistic = (at.batch * plan.heads + head) * plan.positions + query;
          weight = exponential(scores[j] * plan.scale - a.log_sum_exp[statistic]);
          factor = kept(plan, at.batch, head, query, key);
          mean = delta[statistic];
        }
        p[lane + j * kLanes] = weight * factor;
        ds[lane + j * kLanes] = weight * plan.scale * (products[j] * factor - mean);
      }
      sync_block();
      add_weighted_rows<kLanes, kRows>(p, dout, lane, dv);
      add_weighted_rows<kLanes, kRows>(ds, q, lane, dk);
    }
  }
  if (key >= plan.positions) return;
  write_row<kLanes>(a.dk, at, key, plan.dim, dk, a.accumulate_dk);
  write_row<kLanes>(a.dv, at, key, plan.dim, dv, a.accumulate_dv);
}

/// Calls function(integral constant) with the smallest of 64, 128 and 256 that fits a head.
template <class Function>
void for_head_dim(std::size_t dim, Function function) {
  if (dim <= 64) return function(std::integral_constant<unsigned, 64>{});
  if (dim <= 128) return function(std::integral_constant<unsigned, 128>{});
  if (dim <= 256) return function(std::integral_constant<unsigned, 256>{});
  throw base::Unsupported("attention: heads of " + std::to_string(dim) + " elements; on cuda at most 256");
}

template <class T, unsigned most_dim>
Grid attention_grid(const AttentionShape& s, std::size_t heads, unsigned tiles, unsigned squares) {
  using W = OpMath<T>;
  constexpr unsigned kRows = kTileRows<W, most_dim>;
  return {.blocks = s.batch * heads * divided_up(s.positions, kRows),
          .threads = tile_threads<W, most_dim>(),
          .shared = (tiles * tile_elements<W>(kRows, s.dim) + squares * kRows * (kRows + 1)) * sizeof(W)};
}

inline void check_heads(const AttentionShape& s) {
  if (s.kv_heads == 0 || s.heads % s.kv_heads != 0 || s.dim == 0)
    throw base::InvalidUsage("attention: " + std::to_string(s.heads) + " heads of " + std::to_string(s.dim) + " over " +
                             std::to_string(s.kv_heads) + " key/value heads; the latter must divide the former");
}

template <class T>
void attention_forward(NativeStream stream, const AttentionForward<T>& a) {
  check_heads(a.shape);
  if constexpr (sizeof(T) == 2)
    if (on_matrix_units<T>(a.shape)) return tensor_forward(stream, a);
  for_head_dim(a.shape.dim, [&](auto most) {
    launch(stream, attention_grid<T, most()>(a.shape, a.shape.heads, 3, 1), attention_forward_kernel<T, most()>, a,
           plan_of<T>(a.shape, a.dropout));
  });
}

template <class T>
std::size_t attention_backward_scratch(const AttentionShape& s) {
  if constexpr (sizeof(T) == 2)
    if (on_matrix_units<T>(s)) return tensor_backward_scratch<T>(s);
  return s.batch * s.heads * s.positions * sizeof(OpMath<T>);
}

template <class T>
void attention_backward(NativeStream stream, const AttentionBackward<T>& a) {
  check_heads(a.shape);
  const AttentionPlan<T> plan = plan_of<T>(a.shape, a.dropout);
  if constexpr (sizeof(T) == 2)
    if (on_matrix_units<T>(a.shape)) return tensor_backward(stream, a, plan);
  const std::size_t rows = a.shape.batch * a.shape.heads * a.shape.positions;
  auto* delta = static_cast<OpMath<T>*>(a.scratch);
  const auto* means = static_cast<const OpMath<T>*>(delta);
  launch(stream, {.blocks = divided_up(rows, 4), .threads = 128}, attention_delta_kernel<T>, a, plan, rows, delta);
  for_head_dim(a.shape.dim, [&](auto most) {
    launch(stream, attention_grid<T, most()>(a.shape, a.shape.kv_heads, 4, 2), attention_dkv_kernel<T, most()>, a, plan,
           means);
    launch(stream, attention_grid<T, most()>(a.shape, a.shape.heads, 4, 1), attention_dq_kernel<T, most()>, a, plan,
           means);
  });
}

}  // namespace tessera::nn::cuda
