#include <limits>

#include "tessera/base/portable_math.h"
#include "tessera/nn/kernels/cpu/attention_block.h"
#include "tessera/nn/kernels/cpu/tiles.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/nn/kernels/cpu/attention_forward.cpp"
#include "hwy/foreach_target.h"  // includes this file once per instruction set

#include "tessera/nn/kernels/cpu/block_gemm-inl.h"
#include "tessera/nn/kernels/cpu/math-inl.h"

#ifndef TESSERA_NN_KERNELS_ATTENTION_FORWARD_ONCE
#define TESSERA_NN_KERNELS_ATTENTION_FORWARD_ONCE
namespace tessera::nn::kernels {
/// The queries of one block of one head.
struct QueryBlock {
  std::size_t batch, head, block;
};
template <class T>
struct AttentionForwardTable {
  void (*block)(const AttentionForward<T>&, QueryBlock, T* scratch);
};
}  // namespace tessera::nn::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::nn::kernels::HWY_NAMESPACE {
namespace {

/// The running softmax of a block of queries. Per query: the largest score so far, the sum of exponentials relative to
/// it, and the factor by which the last step scaled the earlier results.
template <class T>
struct Running {
  T* max;
  T* sum;
  T* shrink;
};

/// Turns the scores in s[key, query] into exp(score - new max), zero above the diagonal if `diagonal`. Queries lie
/// along the vector, so no step adds across lanes.
template <class T>
void softmax_step(T* s, std::size_t keys, bool diagonal, const Running<T>& running) {
  for (std::size_t q = 0; q < kAttentionBlock; q += kLanes<T>) {
    const Vec<T> query = hn::Iota(Tag<T>(), static_cast<T>(q));
    const std::size_t seen = diagonal ? std::min(keys, q + kLanes<T>) : keys;
    const Vec<T> lowest = hn::Set(Tag<T>(), -std::numeric_limits<T>::infinity());
    const Vec<T> old = load<T>(running.max + q);
    Vec<T> max = old;
    for (std::size_t key = 0; key < seen; ++key) {
      T* at = s + key * kAttentionBlock + q;
      Vec<T> score = load<T>(at);
      if (diagonal && key > q) {
        score = hn::IfThenElse(hn::Lt(query, set<T>(static_cast<double>(key))), lowest, score);
        store<T>(score, at);
      }
      max = max_of<T>(max, score);
    }
    Vec<T> sum = hn::Zero(Tag<T>());
    for (std::size_t key = 0; key < seen; ++key) {
      T* at = s + key * kAttentionBlock + q;
      const Vec<T> p = exp<T>(hn::Sub(load<T>(at), max));
      store<T>(p, at);
      sum = hn::Add(sum, p);
    }
    // Products skip zeros only in strips of rows, so all elements that a strip still reads must be zero.
    for (std::size_t key = seen; key < std::min(keys, seen + kStripRows); ++key)
      store<T>(hn::Zero(Tag<T>()), s + key * kAttentionBlock + q);
    const Vec<T> shrink = exp<T>(hn::Sub(old, max));
    store<T>(max, running.max + q);
    store<T>(shrink, running.shrink + q);
    store<T>(mul_add<T>(load<T>(running.sum + q), shrink, sum), running.sum + q);
  }
}

/// Multiplies each of `count` rows by a factor of its own.
template <class T>
void scale_rows(T* rows, std::size_t count, std::size_t width, const T* factors) {
  for (std::size_t r = 0; r < count; ++r) {
    const Vec<T> factor = hn::Set(Tag<T>(), factors[r]);
    map<T>(
        rows + r * width, width, [&](Vec<T> x) HWY_ATTR { return hn::Mul(x, factor); },
        static_cast<const T*>(rows + r * width));
  }
}

template <class T>
void forward_block(const AttentionForward<T>& a, QueryBlock at, T* scratch) {
  const AttentionShape& shape = a.shape;
  const std::size_t dim = shape.dim, padded_width = padded_dim(dim);
  const std::size_t kv_head = at.head / (shape.heads / shape.kv_heads);
  const std::size_t first = at.block * kAttentionBlock, queries = std::min(kAttentionBlock, shape.positions - first);
  T* q_t = scratch;                // [dim, block], scaled
  T* sum = q_t + rows_block(dim);  // [block, wide]: the output before normalization
  T* v_room = sum + rows_block(dim);
  T* s = v_room + rows_block(dim);  // [key, query]
  const Running<T> running{s + kScoreBlock, s + kScoreBlock + kAttentionBlock, s + kScoreBlock + 2 * kAttentionBlock};

  const Rows<const T> q = rows_of(a.q, at.batch, at.head, first);
  transpose_scaled<T>(q.data, q.stride, queries, dim, static_cast<T>(score_scale(shape)), q_t, kAttentionBlock);
  std::fill_n(sum, rows_block(dim), T(0));
  std::fill_n(running.max, kAttentionBlock, std::numeric_limits<T>::lowest());
  std::fill_n(running.sum, kAttentionBlock, T(0));

  const std::size_t last = shape.causal ? at.block : tiles_of(shape.positions, kAttentionBlock) - 1;
  for (std::size_t block = 0; block <= last; ++block) {
    const std::size_t key = block * kAttentionBlock, keys = std::min(kAttentionBlock, shape.positions - key);
    const bool diagonal = shape.causal && block == at.block;
    const Rows<const T> k = rows_of(a.k, at.batch, kv_head, key);
    block_gemm<T>({.m = keys,
                   .n = kAttentionBlock,
                   .k = dim,
                   .a = k.data,
                   .a_row = k.stride,
                   .b = q_t,
                   .b_row = kAttentionBlock,
                   .c = s,
                   .c_row = kAttentionBlock,
                   .triangle = diagonal ? Triangle::c_upper : Triangle::none});
    softmax_step(s, keys, diagonal, running);
    drop_weights<T>(shape, a.dropout, {s, 1, kAttentionBlock, at.batch, at.head, first, queries, key, keys});
    if (block > 0) scale_rows(sum, queries, padded_width, running.shrink);
    const Rows<const T> v = padded(rows_of(a.v, at.batch, kv_head, key), keys, dim, v_room);
    block_gemm<T>({.m = queries,
                   .n = padded_width,
                   .k = keys,
                   .a = s,
                   .a_row = 1,
                   .a_column = kAttentionBlock,
                   .b = v.data,
                   .b_row = v.stride,
                   .c = sum,
                   .c_row = padded_width,
                   .accumulate = true,
                   .triangle = diagonal ? Triangle::a_lower : Triangle::none});
  }

  const Rows<T> out = rows_of(a.out, at.batch, at.head, first);
  for (std::size_t r = 0; r < queries; ++r) {
    const Vec<T> inverse = hn::Set(Tag<T>(), T(1) / running.sum[r]);
    map<T>(
        out.data + r * out.stride, dim, [&](Vec<T> x) HWY_ATTR { return hn::Mul(x, inverse); },
        static_cast<const T*>(sum + r * padded_width));
    if (a.log_sum_exp)
      a.log_sum_exp[(at.batch * shape.heads + at.head) * shape.positions + first + r] =
          running.max[r] + static_cast<T>(base::portable::log(running.sum[r]));
  }
}

template <class T>
constexpr AttentionForwardTable<T> kTable{&forward_block<T>};
TESSERA_KERNEL_TABLES(AttentionForwardTable, attention_forward_tables)

}  // namespace
}  // namespace tessera::nn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::nn::kernels {
TESSERA_CHOSEN_KERNELS(AttentionForwardTable, attention_forward_tables)

std::size_t attention_forward_scratch_bytes(const AttentionShape& shape, std::size_t threads,
                                            std::size_t element_bytes) {
  return threads * forward_scratch(shape.dim) * element_bytes;
}

template <class T>
void attention_forward(ThreadPool& pool, const AttentionForward<T>& args) {
  check(args.shape);
  const auto& table = kernels<T>();
  const std::size_t blocks = tiles_of(args.shape.positions, kAttentionBlock);
  pool.parallel_for(args.shape.batch * args.shape.heads * blocks, [&](std::size_t tile, std::size_t worker) {
    const std::size_t head = tile / blocks;
    // Longest first: the last block attends to the most keys.
    const QueryBlock at{head / args.shape.heads, head % args.shape.heads, blocks - 1 - tile % blocks};
    table.block(args, at, static_cast<T*>(args.scratch) + worker * forward_scratch(args.shape.dim));
  });
}

template void attention_forward<float>(ThreadPool&, const AttentionForward<float>&);
template void attention_forward<double>(ThreadPool&, const AttentionForward<double>&);

}  // namespace tessera::nn::kernels
#endif  // HWY_ONCE
