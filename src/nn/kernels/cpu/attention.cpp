#include <limits>

#include "tessera/base/portable_math.h"
#include "tessera/nn/kernels/cpu/attention_block.h"
#include "tessera/nn/kernels/cpu/tiles.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/nn/kernels/cpu/attention.cpp"
#include "hwy/foreach_target.h"  // includes this file once per instruction set

#include "tessera/nn/kernels/cpu/block_gemm-inl.h"
#include "tessera/nn/kernels/cpu/math-inl.h"

#ifndef TESSERA_NN_KERNELS_ATTENTION_ONCE
#define TESSERA_NN_KERNELS_ATTENTION_ONCE
namespace tessera::nn::kernels {
/// The queries of one block of one head.
struct QueryBlock {
  std::size_t batch, head, block;
};
template <class T>
struct AttentionTable {
  void (*forward)(const AttentionForward<T>&, QueryBlock, T* scratch);
  /// delta[batch, heads, positions]: the product of out and dout per row, over the positions of one head.
  void (*row_products)(const AttentionBackward<T>&, std::size_t batch, std::size_t head, T* delta);
  /// All gradients of one batch entry and key/value head.
  void (*backward)(const AttentionBackward<T>&, std::size_t batch, std::size_t kv_head, const T* delta, T* scratch);
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
  const std::size_t dim = shape.dim, padded_width = padded_dim(dim), n = kAttentionBlock;
  const std::size_t kv_head = at.head / (shape.heads / shape.kv_heads);
  const std::size_t first = at.block * n, queries = std::min(n, shape.positions - first);
  T* q_t = scratch;                // [dim, block], scaled
  T* sum = q_t + rows_block(dim);  // [block, wide]: the output before normalization
  T* v_room = sum + rows_block(dim);
  T* s = v_room + rows_block(dim);  // [key, query]
  const Running<T> running{s + kScoreBlock, s + kScoreBlock + n, s + kScoreBlock + 2 * n};

  const Rows<const T> q = rows_of(a.q, at.batch, at.head, first);
  transpose_scaled<T>(q.data, q.stride, queries, dim, static_cast<T>(score_scale(shape)), q_t, n);
  std::fill_n(sum, rows_block(dim), T(0));
  std::fill_n(running.max, n, std::numeric_limits<T>::lowest());
  std::fill_n(running.sum, n, T(0));

  const std::size_t last = shape.causal ? at.block : tiles_of(shape.positions, n) - 1;
  for (std::size_t block = 0; block <= last; ++block) {
    const std::size_t key = block * n, keys = std::min(n, shape.positions - key);
    const bool diagonal = shape.causal && block == at.block;
    const Triangle c_upper = diagonal ? Triangle::c_upper : Triangle::none;
    const Triangle a_lower = diagonal ? Triangle::a_lower : Triangle::none;
    const Rows<const T> k = rows_of(a.k, at.batch, kv_head, key);
    block_gemm<T>({keys, n, dim, {k.data, k.stride}, {q_t, n}, {s, n}, Output::overwrite, c_upper});
    softmax_step(s, keys, diagonal, running);
    drop_weights<T>(shape, a.dropout, {s, 1, n, at.batch, at.head, first, queries, key, keys});
    if (block > 0) scale_rows(sum, queries, padded_width, running.shrink);
    const Rows<const T> v = padded(rows_of(a.v, at.batch, kv_head, key), keys, dim, v_room);
    block_gemm<T>({queries, padded_width, keys, {s, 1, n}, v, {sum, padded_width}, Output::add, a_lower});
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
void row_products(const AttentionBackward<T>& a, std::size_t batch, std::size_t head, T* delta) {
  const Rows<const T> out = rows_of(a.out, batch, head, 0), dout = rows_of(a.dout, batch, head, 0);
  T* to = delta + (batch * a.shape.heads + head) * a.shape.positions;
  for (std::size_t r = 0; r < a.shape.positions; ++r) {
    Sum<T> sum;
    reduce<T>(
        a.shape.dim, [&](std::size_t p, Vec<T> x, Vec<T> y) HWY_ATTR { sum.part[p] = mul_add<T>(x, y, sum.part[p]); },
        out.data + r * out.stride, dout.data + r * dout.stride);
    to[r] = sum.total();
  }
}

/// Scratch blocks of one thread.
template <class T>
struct Room {
  T *k_t, *v_t;          // [dim, block]; k_t scaled
  T *dk, *dv;            // [block, wide]
  T *q, *k, *dout, *dq;  // [block, wide], only if dim is not a multiple of whole vectors
  T *p, *ds;             // [query, key]
  Room(T* scratch, std::size_t dim) {
    const std::size_t rows = rows_block(dim);
    T** const blocks[] = {&k_t, &v_t, &dk, &dv, &q, &k, &dout, &dq};
    for (T** block : blocks) {
      *block = scratch;
      scratch += rows;
    }
    p = scratch;
    ds = p + kScoreBlock;
  }
};

/// p[query, key]: turns scores into probabilities; ds: turns products with dout into gradients of the scores.
template <class T>
void probabilities(const Room<T>& room, std::size_t queries, bool diagonal, T scale, const T* log_sum_exp,
                   const T* delta) {
  const Vec<T> factor = hn::Set(Tag<T>(), scale);
  for (std::size_t r = 0; r < queries; ++r) {
    const Vec<T> shift = hn::Set(Tag<T>(), log_sum_exp[r]);
    const Vec<T> mean = hn::Set(Tag<T>(), delta[r]);
    T* p = room.p + r * kAttentionBlock;
    T* ds = room.ds + r * kAttentionBlock;
    const std::size_t seen = diagonal ? r + 1 : kAttentionBlock;
    std::size_t key = 0;
    for (; key < seen; key += kLanes<T>) {
      const Vec<T> x = exp<T>(hn::Sub(load<T>(p + key), shift));
      store<T>(x, p + key);
      store<T>(hn::Mul(hn::Mul(x, factor), hn::Sub(load<T>(ds + key), mean)), ds + key);
    }
    if (!diagonal) continue;
    // Products skip zeros only in strips of rows, so all elements that a strip still reads must be zero.
    const std::size_t zeros = std::min(kAttentionBlock, seen + kStripRows);
    for (key = seen; key < zeros; ++key) p[key] = ds[key] = T(0);
  }
}

/// A block of queries of one head and a block of keys, which contribute to each other's gradients.
struct Pair {
  std::size_t batch, head, kv_head, query_block, key_block;
};
template <class T>
void pair_of_blocks(const AttentionBackward<T>& a, const Pair& at, Rows<const T> k, const T* delta,
                    const Room<T>& room) {
  const AttentionShape& shape = a.shape;
  const std::size_t dim = shape.dim, padded_width = padded_dim(dim), n = kAttentionBlock;
  const std::size_t first = at.query_block * n, queries = std::min(n, shape.positions - first);
  const std::size_t keys = std::min(n, shape.positions - at.key_block * n);
  const bool diagonal = shape.causal && at.query_block == at.key_block;
  const std::size_t row = (at.batch * shape.heads + at.head) * shape.positions + first;
  const Rows<const T> q = padded(rows_of(a.q, at.batch, at.head, first), queries, dim, room.q);
  const Rows<const T> dout = padded(rows_of(a.dout, at.batch, at.head, first), queries, dim, room.dout);
  const Triangle c_lower = diagonal ? Triangle::c_lower : Triangle::none;
  const Triangle a_upper = diagonal ? Triangle::a_upper : Triangle::none;
  const Triangle a_lower = diagonal ? Triangle::a_lower : Triangle::none;
  const Output dq_output = at.key_block > 0 || a.accumulate_dq ? Output::add : Output::overwrite;

  block_gemm<T>({queries, n, dim, {q.data, q.stride}, {room.k_t, n}, {room.p, n}, Output::overwrite, c_lower});
  block_gemm<T>({queries, n, dim, {dout.data, dout.stride}, {room.v_t, n}, {room.ds, n}, Output::overwrite, c_lower});
  WeightBlock<T> weights{room.ds, n, 1, at.batch, at.head, first, queries, at.key_block * n, keys};
  drop_weights(shape, a.dropout, weights);  // dropped weights contribute no gradient
  probabilities(room, queries, diagonal, static_cast<T>(score_scale(shape)), a.log_sum_exp + row, delta + row);
  weights.data = room.p;
  drop_weights(shape, a.dropout, weights);
  block_gemm<T>({keys, padded_width, queries, {room.p, 1, n}, dout, {room.dv, padded_width}, Output::add, a_upper});
  block_gemm<T>({keys, padded_width, queries, {room.ds, 1, n}, q, {room.dk, padded_width}, Output::add, a_upper});
  block_gemm<T>({queries, dim, keys, {room.ds, n}, k, rows_of(a.dq, at.batch, at.head, first), dq_output, a_lower});
}

template <class T>
void write_rows(const T* from, std::size_t count, std::size_t dim, bool accumulate, Rows<T> to) {
  for (std::size_t r = 0; r < count; ++r)
    map_into<T>(
        accumulate, to.data + r * to.stride, dim, [](Vec<T> x) HWY_ATTR { return x; }, from + r * padded_dim(dim));
}

template <class T>
void head_gradients(const AttentionBackward<T>& a, std::size_t batch, std::size_t kv_head, const T* delta, T* scratch) {
  const AttentionShape& shape = a.shape;
  const std::size_t dim = shape.dim, n = kAttentionBlock, group = shape.heads / shape.kv_heads;
  const std::size_t blocks = tiles_of(shape.positions, n);
  const Room<T> room(scratch, dim);
  for (std::size_t block = 0; block < blocks; ++block) {
    const std::size_t first = block * n, keys = std::min(n, shape.positions - first);
    const Rows<const T> k = rows_of(a.k, batch, kv_head, first), v = rows_of(a.v, batch, kv_head, first);
    transpose_scaled<T>(k.data, k.stride, keys, dim, static_cast<T>(score_scale(shape)), room.k_t, n);
    transpose_scaled<T>(v.data, v.stride, keys, dim, T(1), room.v_t, n);
    const Rows<const T> k_padded = padded(k, keys, dim, room.k);
    std::fill_n(room.dk, rows_block(dim), T(0));
    std::fill_n(room.dv, rows_block(dim), T(0));
    for (std::size_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
      for (std::size_t query_block = shape.causal ? block : 0; query_block < blocks; ++query_block)
        pair_of_blocks(a, {batch, head, kv_head, query_block, block}, k_padded, delta, room);
    write_rows<T>(room.dk, keys, dim, a.accumulate_dk, rows_of(a.dk, batch, kv_head, first));
    write_rows<T>(room.dv, keys, dim, a.accumulate_dv, rows_of(a.dv, batch, kv_head, first));
  }
}

template <class T>
constexpr AttentionTable<T> kTable{&forward_block<T>, &row_products<T>, &head_gradients<T>};
TESSERA_KERNEL_TABLES(AttentionTable, attention_tables)

}  // namespace
}  // namespace tessera::nn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::nn::kernels {
TESSERA_CHOSEN_KERNELS(AttentionTable, attention_tables)
namespace {

/// Elements of the row products, which precede the threads' blocks; whole cache lines.
std::size_t delta_elements(const AttentionShape& shape) {
  return (shape.batch * shape.heads * shape.positions + 15) / 16 * 16;
}

}  // namespace

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
    table.forward(args, at, static_cast<T*>(args.scratch) + worker * forward_scratch(args.shape.dim));
  });
}

template void attention_forward<float>(ThreadPool&, const AttentionForward<float>&);
template void attention_forward<double>(ThreadPool&, const AttentionForward<double>&);

std::size_t attention_backward_scratch_bytes(const AttentionShape& shape, std::size_t threads,
                                             std::size_t element_bytes) {
  return (delta_elements(shape) + threads * backward_scratch(shape.dim)) * element_bytes;
}

template <class T>
void attention_backward(ThreadPool& pool, const AttentionBackward<T>& args) {
  check(args.shape);
  const auto& table = kernels<T>();
  const AttentionShape& shape = args.shape;
  T* delta = static_cast<T*>(args.scratch);
  T* blocks = delta + delta_elements(shape);
  pool.parallel_for(shape.batch * shape.heads,
                    [&](std::size_t tile) { table.row_products(args, tile / shape.heads, tile % shape.heads, delta); });
  pool.parallel_for(shape.batch * shape.kv_heads, [&](std::size_t tile, std::size_t worker) {
    table.backward(args, tile / shape.kv_heads, tile % shape.kv_heads, delta,
                   blocks + worker * backward_scratch(shape.dim));
  });
}

template void attention_backward<float>(ThreadPool&, const AttentionBackward<float>&);
template void attention_backward<double>(ThreadPool&, const AttentionBackward<double>&);

}  // namespace tessera::nn::kernels
#endif  // HWY_ONCE
