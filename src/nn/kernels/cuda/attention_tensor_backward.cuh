// The kernels of attention_tensor.cuh's backward and their launch.
#pragma once

#include "tessera/nn/kernels/cuda/attention_tensor_step.cuh"

namespace tessera::nn::cuda {

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
