// The gradients of layer norm and RMS norm.
#pragma once

#include "tessera/nn/kernels/cuda/norm.cuh"

namespace tessera::nn::cuda {

/// The sums of one thread's columns.
template <class T, int packs>
struct NormSums {
  OpMath<T> weight[packs > 0 ? packs : 1][kVector<T>] = {};
  OpMath<T> bias[packs > 0 ? packs : 1][kVector<T>] = {};
};

/// parts[0, tile] and parts[1, tile] = the block's sums: those of its teams, in order. A block of one team needs no
/// shared memory for them.
template <class T, bool centered, int packs>
TESSERA_DEVICE void store_sums(const NormShare<T, packs>& share, const NormSums<T, packs>& sums, unsigned team,
                               std::size_t width, OpMath<T>* parts) {
  using W = OpMath<T>;
  const unsigned own = thread_index() / team, teams = thread_count() / team;
  W* const to_weight = parts + block_index() * width;
  W* const to_bias = parts + (block_count() + block_index()) * width;
  W* const weight = teams == 1 ? to_weight : shared_memory<W>();
  W* const bias = teams == 1 ? to_bias : weight + width;
  for (unsigned now = 0; now < teams; ++now) {
    if (own == now)
      share.each([&](int k, unsigned i) {
        share.elements(i, [&](int e) {
          weight[i + e] = now == 0 ? sums.weight[k][e] : weight[i + e] + sums.weight[k][e];
          if (centered) bias[i + e] = now == 0 ? sums.bias[k][e] : bias[i + e] + sums.bias[k][e];
        });
      });
    sync_block();
  }
  if (teams == 1) return;
  for (std::size_t i = thread_index(); i < width; i += thread_count()) {
    to_weight[i] = weight[i];
    if (centered) to_bias[i] = bias[i];
  }
}

// With g = dy * weight and n the normalized row: dx = rstd (g - mean(g) - n mean(g n)); RMS norm has no mean(g).
/// A block has `each` rows, a team every teams-th of them. `parts`: null: no gradients of weight and bias are wanted,
/// or another kernel computes them (packs == 0).
template <class T, bool centered, int packs>
TESSERA_BOUNDED_KERNEL(kNormThreads, centered&& packs == kNormPacks ? 1 : 2)
void norm_backward_kernel(NormBackward<T> a, unsigned team, bool aligned, std::size_t each, OpMath<T>* parts) {
  using W = OpMath<T>;
  W* room = shared_memory<W>();
  const NormShare<T, packs> share(a.width, team, aligned);
  const std::size_t end = smaller(a.rows, (block_index() + 1) * each);
  NormSums<T, packs> sums;
  for (std::size_t row = block_index() * each + thread_index() / team; row < end; row += thread_count() / team) {
    NormValues<T, packs> x, dy;
    x.read(share, a.x + row * a.width);
    dy.read(share, a.dy + row * a.width);
    const W mean = centered ? a.mean[row] : W(0), rstd = a.rstd[row];
    W sum = 0, product = 0;
    share.each([&](int k, unsigned i) {
      const Pack<T, kVector<T>> from = x.at(share, k, i), d = dy.at(share, k, i), weight = share.read(a.weight, i);
      share.elements(i, [&](int e) {
        const W up = to_opmath(d.at[e]), g = up * to_opmath(weight.at[e]);
        const W normalized = (to_opmath(from.at[e]) - mean) * rstd;
        if (centered) sum += g;
        product = fused(g, normalized, product);
        if constexpr (packs > 0) {
          sums.weight[k][e] = fused(up, normalized, sums.weight[k][e]);
          if (centered) sums.bias[k][e] += up;
        }
      });
    });
    if (a.dx == nullptr) continue;
    T* dx = a.dx + row * a.width;
    NormValues<T, packs> before;  // loaded before the first store, which no load can pass
    if (a.accumulate_dx) before.read(share, dx);
    const W width = static_cast<W>(a.width);
    const W mean_g = centered ? share.reduced(sum, Add{}, room) / width : W(0);
    const W mean_gn = share.reduced(product, Add{}, room) / width;
    share.each([&](int k, unsigned i) {
      const Pack<T, kVector<T>> from = x.at(share, k, i), d = dy.at(share, k, i), weight = share.read(a.weight, i);
      Pack<T, kVector<T>> out = {};
      if (a.accumulate_dx) out = before.at(share, k, i);
      share.elements(i, [&](int e) {
        const W normalized = (to_opmath(from.at[e]) - mean) * rstd;
        const W value = rstd * fused(-normalized, mean_gn, to_opmath(d.at[e]) * to_opmath(weight.at[e]) - mean_g);
        out.at[e] = added(a.accumulate_dx, out.at[e], value);
      });
      share.write(dx, i, out);
    });
  }
  if constexpr (packs > 0)
    if (parts != nullptr) store_sums<T, centered>(share, sums, team, a.width, parts);
}

/// dy * n and dy, for rows that no team holds.
template <class T>
struct NormColumns {
  static constexpr std::size_t kSums = 2;
  const T* x;
  const T* dy;
  const OpMath<T>* mean;  // null for RMS norm
  const OpMath<T>* rstd;
  template <class Load, int n>
  TESSERA_DEVICE void add(std::size_t row, std::size_t at, const Load& load_from, OpMath<T> (&sums)[2][n]) const {
    using W = OpMath<T>;
    const Pack<T, n> from = load_from(x + at), d = load_from(dy + at);
    const W center = mean ? mean[row] : W(0), factor = rstd[row];
    TESSERA_UNROLL
    for (int e = 0; e < n; ++e) {
      const W up = to_opmath(d.at[e]);
      sums[0][e] = fused(up, (to_opmath(from.at[e]) - center) * factor, sums[0][e]);
      sums[1][e] += up;
    }
  }
};

/// Scratch bytes of norm_backward.
template <class T>
std::size_t norm_scratch(std::size_t rows, std::size_t width) {
  return larger(2 * row_tiles(rows) * width * sizeof(OpMath<T>), column_scratch<T>(rows, width, 2));
}

/// dx may be dy, so another kernel's column sums come first.
template <class T, bool centered>
void norm_backward(NativeStream stream, const NormBackward<T>& a, OpMath<T>* scratch) {
  using W = OpMath<T>;
  const NormTeams teams = norm_teams<T>(a.width);
  const bool sums = a.dweight != nullptr || a.dbias != nullptr, held = teams.packs > 0;
  const bool is_aligned = held && aligned({a.x, a.weight, a.dy, a.dx});
  const std::size_t tiles = held ? row_tiles(a.rows) : column_tiles<T>(a.rows, a.width);
  if (sums && !held)
    column_parts<T>(stream, NormColumns<T>{a.x, a.dy, a.mean, a.rstd}, a.rows, a.width, aligned({a.x, a.dy}), scratch);
  if (a.dx != nullptr || held)
    with_packs(teams.packs, [&](auto packs) {
      const std::size_t each = held ? divided_up(a.rows, larger<std::size_t>(1, tiles)) : teams.block / teams.team;
      const std::size_t room = teams.team == kWarp ? 2 * a.width * sizeof(W) : 0;  // for store_sums()
      launch(stream,
             {.blocks = held ? tiles : divided_up(a.rows, each),
              .threads = teams.block,
              .shared = larger(kReduceRoom<W>, room)},
             norm_backward_kernel<T, centered, packs>, a, teams.team, is_aligned, each,
             held && sums ? scratch : nullptr);
    });
  if (sums)
    combine_columns<T>(stream, scratch, tiles, a.width,
                       {ColumnTarget<T>{a.dweight, a.accumulate_dweight}, {a.dbias, a.accumulate_dbias}});
}

}  // namespace tessera::nn::cuda
