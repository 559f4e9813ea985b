// The kernels of attention_tensor.cuh's backward and their launch.
#pragma once

#include "tessera/nn/kernels/cuda/attention_tensor.cuh"
#include "tessera/nn/kernels/cuda/reduce.cuh"

namespace tessera::nn::cuda {

// The backward of attention_tensor.cuh in one pass of five products. A block has 128 keys, whose dk and dv stay in
// registers, and steps through 64 queries at a time. Scores are computed transposed, so that weights and their
// gradients are left operands of the products for dv and dk as they are; through shared memory the gradients also
// become a left operand for dq.
//
// Every block of keys adds to dq of its queries: in a buffer of f32, the last keys first, each block in its turn.
// Blocks begin in this order too. A block's first queries are those of its own keys, to which it adds first, and for
// each later step the block before it has had its turn two steps earlier, so blocks seldom wait.

/// What the gradients need of a query besides its row: the logarithm to base 2 of the sum of its weights, and the
/// product of the output and its gradient.
struct alignas(8) RowStatistics {
  float log_sum, delta;
};
struct alignas(16) TwoRowStatistics {
  RowStatistics row[2];
};
struct alignas(16) FourSums {
  float v[4];
};

/// Scratch memory of the backward. Positions are padded to whole steps.
struct BackwardScratch {
  RowStatistics* statistics;  ///< [batch, heads, padded positions]
  FourSums* dq;               ///< [batch, heads, steps, 8, threads], as the threads hold them; unused by a single block
  std::uint32_t* turns;       ///< [batch, heads, steps]: the blocks that have added to dq
  std::uint32_t* begun;       ///< number of blocks that have begun
};

/// A warp's keys are 32 where dk and dv of as many fit in registers.
template <unsigned width>
struct BackwardShape {
  static constexpr unsigned kTiles = width == 64 ? 2 : 1;  // of 16 keys, per warp
  static constexpr unsigned kThreads = kBlockRows / 16 / kTiles * kWarp;
  static constexpr unsigned kGradientLine = kStepRows + kFragmentPadding;
  static constexpr unsigned kDqTiles = 2, kDqColumns = 32;  // of dq, per warp: 32 queries, 32 elements
  static_assert(kStepRows / 32 * (width / kDqColumns) == kThreads / kWarp);
};

/// Shared memory of a block.
template <class T, unsigned width>
struct BackwardMemory {
  using S = BackwardShape<width>;
  static constexpr unsigned kStage = kStepRows * kTileLine<width>;
  static constexpr std::size_t kBytes =
      sizeof(T) * (2 * kBlockRows * kTileLine<width> + 4 * kStage + kBlockRows * S::kGradientLine) +
      2 * kStepRows * sizeof(RowStatistics) + 16;

  TESSERA_DEVICE BackwardMemory()
      : k(shared_memory<T>()),
        v(k + kBlockRows * kTileLine<width>),
        stages(v + kBlockRows * kTileLine<width>),
        gradients(stages + 4 * kStage),
        statistics(reinterpret_cast<RowStatistics*>(gradients + kBlockRows * S::kGradientLine)),
        number(reinterpret_cast<std::uint32_t*>(statistics + 2 * kStepRows)) {}
  TESSERA_DEVICE T* q(unsigned stage) const { return stages + stage * 2 * kStage; }
  TESSERA_DEVICE T* dout(unsigned stage) const { return q(stage) + kStage; }
  TESSERA_DEVICE RowStatistics* rows(unsigned stage) const { return statistics + stage * kStepRows; }

  T *k, *v, *stages;
  T* gradients;  ///< of the scores, transposed: [keys][queries]
  RowStatistics* statistics;
  std::uint32_t* number;
};

/// The queries of a step.
struct Queries {
  std::size_t batch, head;
  std::size_t step;  ///< of the head
  TESSERA_DEVICE std::size_t first() const { return step * kStepRows; }
  TESSERA_DEVICE std::size_t index(std::size_t heads, std::size_t positions) const {
    return (batch * heads + head) * divided_up(positions, kStepRows) + step;
  }
};

template <class T, unsigned width>
TESSERA_DEVICE void load_queries(const BackwardMemory<T, width>& memory, unsigned stage, const AttentionBackward<T>& a,
                                 const AttentionPlan<T>& plan, const BackwardScratch& scratch, const Queries& queries) {
  constexpr unsigned kThreads = BackwardShape<width>::kThreads;
  const TilePlace place{queries.batch, queries.head, queries.first()};
  begin_load<width, kStepRows, kThreads>(memory.q(stage), a.q, place, plan);
  begin_load<width, kStepRows, kThreads>(memory.dout(stage), a.dout, place, plan);
  const unsigned pair = thread_index();
  if (pair < kStepRows / 2)
    copy_async(memory.rows(stage) + pair * 2,
               scratch.statistics + queries.index(plan.heads, plan.positions) * kStepRows + pair * 2, true);
}

/// The gradients of scores from the first of `key` and `query` on, and the weights, in place of products with dout and
/// of scores. `rows`: of the queries. With `masked`, keys later than their query have neither.
template <bool drops, class T, unsigned tiles, unsigned columns>
TESSERA_DEVICE void weights_and_gradients(Accumulator (&scores)[tiles][columns],
                                          Accumulator (&products)[tiles][columns], const RowStatistics* rows,
                                          const AttentionPlan<T>& plan, const Queries& queries, unsigned key,
                                          unsigned query) {
  if (key + 16 * tiles > query + 1) {  // on the diagonal
    TESSERA_UNROLL
    for (unsigned m = 0; m < tiles; ++m)
      for (unsigned n = 0; n < columns; ++n)
        for (unsigned e = 0; e < 4; ++e)
          if (key + sum_row(m, e) > query + sum_column(n, e)) {
            scores[m][n].v[e] = minus_infinity<float>();
            products[m][n].v[e] = 0;
          }
  }
  const float unit = plan.scale * kLog2E;
  TESSERA_UNROLL
  for (unsigned n = 0; n < columns; ++n) {
    const auto two = *reinterpret_cast<const TwoRowStatistics*>(rows + sum_column(n, 0));
    for (unsigned m = 0; m < tiles; ++m)
      for (unsigned e = 0; e < 4; ++e) {
        const RowStatistics& row = two.row[e % 2];
        float weight = fast_exp2(fused(scores[m][n].v[e], unit, -row.log_sum)), product = products[m][n].v[e];
        float factor = 1;
        if constexpr (drops)
          factor = kept(plan, queries.batch, queries.head, std::size_t{query + sum_column(n, e)},
                        std::size_t{key + sum_row(m, e)});
        if constexpr (drops) product *= factor;
        products[m][n].v[e] = weight * (product - row.delta);
        if constexpr (drops) weight *= factor;
        scores[m][n].v[e] = weight;
      }
  }
}

/// Writes a warp's gradients to shared memory; at: its first key and query.
template <class T, unsigned tiles, unsigned steps>
TESSERA_DEVICE void store_gradients(T* at, unsigned line, const LeftFragment (&gradients)[tiles][steps]) {
  TESSERA_UNROLL
  for (unsigned m = 0; m < tiles; ++m)
    for (unsigned k = 0; k < steps; ++k)
      for (unsigned i = 0; i < 4; ++i)  // as the fragment's words lie
        *reinterpret_cast<std::uint32_t*>(at + (m * 16 + lane_group() + i % 2 * 8) * line + k * 16 + lane_pair() * 2 +
                                          i / 2 * 8) = gradients[m][k].v[i];
}

/// dk and dv of a warp's keys.
template <unsigned width>
struct KeySums {
  Accumulator dk[BackwardShape<width>::kTiles][width / 8] = {}, dv[BackwardShape<width>::kTiles][width / 8] = {};
};

/// Adds a step's queries to the warp's sums, and leaves the gradients of its scores in shared memory.
template <bool drops, class T, unsigned width>
TESSERA_DEVICE void add_queries(const BackwardMemory<T, width>& memory, unsigned stage, const AttentionPlan<T>& plan,
                                const Queries& queries, std::size_t first_key, KeySums<width>& sums) {
  using S = BackwardShape<width>;
  constexpr unsigned kLine = kTileLine<width>;
  const unsigned row = warp_index() * 16 * S::kTiles, key = static_cast<unsigned>(first_key) + row;
  constexpr unsigned kPart = drops ? 16 : 32;  // queries whose scores fit in registers (beside random numbers)
  TESSERA_UNROLL
  for (unsigned part = 0; part < kStepRows; part += kPart) {
    const unsigned query = static_cast<unsigned>(queries.first()) + part;
    LeftFragment gradients[S::kTiles][kPart / 16] = {};
    if (query + kPart > key) {  // otherwise all keys of the warp are later
      const T *const q = memory.q(stage) + part * kLine, *const dout = memory.dout(stage) + part * kLine;
      Accumulator scores[S::kTiles][kPart / 8] = {}, products[S::kTiles][kPart / 8] = {};
      add_row_products<width, S::kTiles, kPart>(memory.k + row * kLine, q, scores);
      add_row_products<width, S::kTiles, kPart>(memory.v + row * kLine, dout, products);
      weights_and_gradients<drops>(scores, products, memory.rows(stage) + part, plan, queries, key, query);
      LeftFragment weights[S::kTiles][kPart / 16];
      round_to_left<T>(scores, weights);
      add_weighted_rows<width>(weights, dout, sums.dv);
      round_to_left<T>(products, gradients);
      add_weighted_rows<width>(gradients, q, sums.dk);
    }
    store_gradients(memory.gradients + row * S::kGradientLine + part, S::kGradientLine, gradients);
  }
}

/// A warp's part of dq: 32 queries and 32 elements.
template <unsigned width>
using DqSums = Accumulator[BackwardShape<width>::kDqTiles][BackwardShape<width>::kDqColumns / 8];

/// sums += (gradients of the scores of kStepRows keys)^T x (those keys); from the warp's first query and element.
template <class T, unsigned width>
TESSERA_DEVICE void add_key_products(const T* gradients, const T* keys, DqSums<width>& sums) {
  using S = BackwardShape<width>;
  TESSERA_UNROLL
  for (unsigned k = 0; k < kStepRows; k += 16) {
    LeftFragment left[S::kDqTiles];
    TESSERA_UNROLL
    for (unsigned m = 0; m < S::kDqTiles; ++m)
      left[m] = left_fragment_of_columns(gradients + k * S::kGradientLine + m * 16, S::kGradientLine);
    TESSERA_UNROLL
    for (unsigned n = 0; n < S::kDqColumns; n += 16) {
      const RightFragments right = right_fragments(keys + k * kTileLine<width> + n, kTileLine<width>);
      TESSERA_UNROLL
      for (unsigned m = 0; m < S::kDqTiles; ++m)
        for (unsigned half = 0; half < 2; ++half) multiply_add<T>(sums[m][n / 8 + half], left[m], right.v[half]);
    }
  }
}

/// Adds the block's part of dq to that of the blocks before it; the last one writes it.
template <class T, unsigned width>
TESSERA_DEVICE void add_to_dq(const BackwardMemory<T, width>& memory, const AttentionBackward<T>& a,
                              const AttentionPlan<T>& plan, const BackwardScratch& scratch, const Queries& queries,
                              std::size_t first_key) {
  using S = BackwardShape<width>;
  constexpr unsigned kColumns = S::kDqColumns / 8;
  const unsigned query = warp_index() % 2 * 32, d = warp_index() / 2 * S::kDqColumns;
  const std::size_t keys = queries.first() + kStepRows - first_key;  // those from there on are later than all queries
  const bool begins = keys <= kBlockRows, ends = first_key == 0;
  FourSums* const shared =
      scratch.dq + queries.index(plan.heads, plan.positions) * (S::kDqTiles * kColumns * S::kThreads) + thread_index();
  FourSums before[S::kDqTiles * kColumns] = {};
  const auto read_before = [&] {
    if (!begins)
      for (unsigned i = 0; i < S::kDqTiles * kColumns; ++i) before[i] = read_shared_sum(shared + i * S::kThreads);
  };
  if constexpr (width == 64) read_before();  // on their way during the products, where there are enough registers
  DqSums<width> sums = {};
  for (unsigned key = 0; key < (begins ? keys : kBlockRows); key += kStepRows)
    add_key_products<T, width>(memory.gradients + key * S::kGradientLine + query, memory.k + key * kTileLine<width> + d,
                               sums);
  if constexpr (width != 64) read_before();
  TESSERA_UNROLL
  for (unsigned i = 0; i < S::kDqTiles * kColumns; ++i) {
    Accumulator& sum = sums[i / kColumns][i % kColumns];
    for (unsigned e = 0; e < 4; ++e) sum.v[e] += before[i].v[e];
    if (!ends) write_shared_sum(shared + i * S::kThreads, FourSums{{sum.v[0], sum.v[1], sum.v[2], sum.v[3]}});
  }
  const float factor[S::kDqTiles][2] = {{plan.scale, plan.scale}, {plan.scale, plan.scale}};
  if (ends)
    write_sums(a.dq, {queries.batch, queries.head, queries.first() + query, d, a.accumulate_dq}, plan, sums, factor);
}

/// The turns of a block at the sums of a step's queries: the block of their own keys is the first.
struct DqTurn {
  std::uint32_t* counter;
  std::uint32_t turn;
  bool last;
  TESSERA_DEVICE void await() const {
    if (turn > 0) await_turn(counter, turn);
  }
  TESSERA_DEVICE void pass() const {
    if (!last) pass_turn(counter, turn + 1);
  }
};
template <class T>
TESSERA_DEVICE DqTurn dq_turn(const BackwardScratch& scratch, const AttentionPlan<T>& plan, const Queries& queries,
                              std::size_t first_key) {
  const std::size_t own_keys = queries.first() / kBlockRows, keys = first_key / kBlockRows;
  return {scratch.turns + queries.index(plan.heads, plan.positions), static_cast<std::uint32_t>(own_keys - keys),
          keys == 0};
}

template <class T, unsigned width, bool drops>
TESSERA_KERNEL void tensor_backward_kernel(AttentionBackward<T> a, AttentionPlan<T> plan, BackwardScratch scratch) {
  using S = BackwardShape<width>;
  const BackwardMemory<T, width> memory;
  if (thread_index() == 0) *memory.number = next_number(scratch.begun);
  sync_block();
  const TilePlace at = last_tile_first(*memory.number, plan.kv_heads, plan.positions);
  begin_load<width, kBlockRows, S::kThreads>(memory.k, a.k, at, plan);
  begin_load<width, kBlockRows, S::kThreads>(memory.v, a.v, at, plan);
  const std::size_t group = plan.heads / plan.kv_heads, steps = divided_up(plan.positions, kStepRows);
  const auto after = [&](const Queries& q) {  // the next step of this head, or the first one of the next head
    return q.step + 1 < steps ? Queries{q.batch, q.head, q.step + 1}
                              : Queries{q.batch, q.head + 1, at.first / kStepRows};
  };
  Queries queries{at.batch, at.head * group, at.first / kStepRows};
  load_queries(memory, 0, a, plan, scratch, queries);
  commit_copies();
  KeySums<width> sums;
  DqTurn previous{nullptr, 0, true};
  for (unsigned stage = 0; queries.head < (at.head + 1) * group; stage ^= 1) {
    wait_copies<0>();
    sync_block();  // this stage is complete, and no thread uses the other one, or the gradients, any longer
    const Queries next = after(queries);
    if (next.head < (at.head + 1) * group) load_queries(memory, stage ^ 1, a, plan, scratch, next);
    commit_copies();
    add_queries<drops>(memory, stage, plan, queries, at.first, sums);
    const DqTurn turn = dq_turn(scratch, plan, queries, at.first);
    if (thread_index() == 0) {
      previous.pass();  // by now its writes have arrived
      turn.await();
    }
    sync_block();
    add_to_dq(memory, a, plan, scratch, queries, at.first);
    previous = turn;
    queries = next;
  }
  sync_block();
  if (thread_index() == 0) previous.pass();
  float one[S::kTiles][2], scale[S::kTiles][2];
  for (unsigned m = 0; m < S::kTiles; ++m)
    for (unsigned half = 0; half < 2; ++half) one[m][half] = 1, scale[m][half] = plan.scale;
  const std::size_t key = at.first + warp_index() * 16 * S::kTiles;
  write_sums(a.dk, {at.batch, at.head, key, 0, a.accumulate_dk}, plan, sums.dk, scale);
  write_sums(a.dv, {at.batch, at.head, key, 0, a.accumulate_dv}, plan, sums.dv, one);
}

/// The statistics of each query, and all counters zero. Beyond the last position all weights will be zero. One lane per
/// eight elements of a row.
template <class T, unsigned width>
TESSERA_KERNEL void tensor_statistics_kernel(AttentionBackward<T> a, AttentionPlan<T> plan, BackwardScratch scratch,
                                             std::size_t rows) {
  constexpr unsigned kLanes = width / 8;
  const std::size_t row = block_index() * (thread_count() / kLanes) + thread_index() / kLanes;
  const std::size_t inside = row < rows ? row : rows - 1;  // sums need whole warps
  const std::size_t padded = divided_up(plan.positions, kStepRows) * kStepRows;
  const std::size_t position = inside % padded, head = inside / padded % plan.heads,
                    batch = inside / padded / plan.heads;
  const unsigned lane = thread_index() % kLanes;
  float delta = 0;
  if (position < plan.positions) {
    const T* const out = head_at(a.out, batch, head) + position * a.out.position_stride + lane * 8;
    const T* const dout = head_at(a.dout, batch, head) + position * a.dout.position_stride + lane * 8;
    const bool whole =
        plan.dim % 8 == 0 && (reinterpret_cast<std::uintptr_t>(out) | reinterpret_cast<std::uintptr_t>(dout)) % 16 == 0;
    Eight<T> left = {}, right = {};
    if (whole && lane * 8 < plan.dim) {
      left = load_whole(reinterpret_cast<const Eight<T>*>(out));
      right = load_whole(reinterpret_cast<const Eight<T>*>(dout));
    }
    for (unsigned e = 0; e < 8; ++e) {
      if (!whole && lane * 8 + e < plan.dim) left.v[e] = load_whole(out + e), right.v[e] = load_whole(dout + e);
      delta = fused(to_opmath(left.v[e]), to_opmath(right.v[e]), delta);
    }
  }
  delta = over_row<kLanes>(delta, Add{});
  if (row >= rows || lane != 0) return;
  const float log_sum = position < plan.positions
                            ? a.log_sum_exp[(batch * plan.heads + head) * plan.positions + position] * kLog2E
                            : -minus_infinity<float>();
  scratch.statistics[row] = {log_sum, delta};
  if (position % kStepRows == 0) scratch.turns[row / kStepRows] = 0;
  if (row == 0) *scratch.begun = 0;
}

/// Lays out scratch memory from `base` on; returns its size. `base` may be null.
template <unsigned width>
std::size_t lay_out_scratch(const AttentionShape& s, void* base, BackwardScratch& scratch) {
  const std::size_t steps = s.batch * s.heads * divided_up(s.positions, kStepRows);
  std::size_t bytes = 0;
  const auto part = [&]<class P>(P*& pointer, std::size_t count) {
    pointer = base == nullptr ? nullptr : reinterpret_cast<P*>(static_cast<char*>(base) + bytes);
    bytes += divided_up(count * sizeof(P), 64) * 64;
  };
  part(scratch.statistics, steps * kStepRows);
  part(scratch.dq, s.positions > kBlockRows ? steps * kStepRows * width / 4 : 0);
  part(scratch.turns, steps);
  part(scratch.begun, 1);
  return bytes;
}

template <class T>
std::size_t tensor_backward_scratch(const AttentionShape& s) {
  BackwardScratch scratch;
  return s.dim <= 64 ? lay_out_scratch<64>(s, nullptr, scratch) : lay_out_scratch<128>(s, nullptr, scratch);
}

template <class T>
void tensor_backward(NativeStream stream, const AttentionBackward<T>& a, const AttentionPlan<T>& plan) {
  const AttentionShape& s = a.shape;
  const std::size_t rows = s.batch * s.heads * divided_up(s.positions, kStepRows) * kStepRows;
  for_tensor_kernel(s.dim, plan.drops, [&](auto width, auto drops) {
    using Shape = BackwardShape<width()>;
    BackwardScratch scratch;
    lay_out_scratch<width()>(s, a.scratch, scratch);
    launch(stream, {.blocks = divided_up(rows, 1024 / width()), .threads = 128}, tensor_statistics_kernel<T, width()>,
           a, plan, scratch, rows);
    launch(stream,
           {.blocks = s.batch * s.kv_heads * divided_up(s.positions, kBlockRows),
            .threads = Shape::kThreads,
            .shared = BackwardMemory<T, width()>::kBytes},
           tensor_backward_kernel<T, width(), drops()>, a, plan, scratch);
  });
}

}  // namespace tessera::nn::cuda
