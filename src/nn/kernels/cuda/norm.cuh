// Layer norm and RMS norm over the last dimension. A team of threads, a warp or a whole block, holds a row in registers
// as vectors of 16 bytes, so every array is read and written once. The gradients of weight and bias are summed in the
// same pass, over tiles of rows (reduce.cuh). The width alone decides which thread adds which elements: neither the
// grid nor an address shows in the bits.
#pragma once

#include "tessera/nn/kernels/cuda/reduce.cuh"
#include "tessera/nn/kernels/norm.h"

namespace tessera::nn::cuda {

using kernels::NormBackward;
using kernels::NormForward;
using kernels::RowNorm;

/// Vectors of a row that a thread holds, at most.
inline constexpr int kNormPacks = 4;
inline constexpr unsigned kNormThreads = 256;

/// How threads share rows of one width. Thread t of a team has vectors t, t + team, ... of the row.
struct NormTeams {
  unsigned team;   ///< threads of a row: a warp, or a block
  unsigned block;  ///< threads of a block
  int packs;       ///< vectors of a thread; 0: the row isn't held (odd or very wide), and is read again for each pass
};
template <class T>
NormTeams norm_teams(std::size_t width) {
  const std::size_t vectors = divided_up(width, kVector<T>);
  const std::size_t warps = divided_up(divided_up(vectors, kNormPacks), kWarp);
  const auto team =
      static_cast<unsigned>(larger<std::size_t>(1, smaller<std::size_t>(warps, kNormThreads / kWarp)) * kWarp);
  const std::size_t packs = divided_up(vectors, team);
  const bool held = width % kVector<T> == 0 && packs <= kNormPacks;
  return {team, team == kWarp ? kNormThreads : team, held ? static_cast<int>(packs) : 0};
}
/// Calls function(integral_constant<int, packs>).
template <class Function>
void with_packs(int packs, const Function& function) {
  switch (packs) {
    case 1:
      return function(std::integral_constant<int, 1>());
    case 2:
      return function(std::integral_constant<int, 2>());
    case 3:
      return function(std::integral_constant<int, 3>());
    case 4:
      return function(std::integral_constant<int, 4>());
    default:
      return function(std::integral_constant<int, 0>());
  }
}

/// A thread's share of rows of one width.
template <class T, int packs>
class NormShare {
 public:
  static constexpr int kWide = kVector<T>;

  /// `aligned`: rows begin at multiples of 16 bytes.
  TESSERA_DEVICE NormShare(std::size_t width, unsigned team, bool aligned)
      : width_(static_cast<unsigned>(width)), team_(team), lane_(thread_index() % team), aligned_(aligned) {}

  /// Calls visit(k, i) for each vector: the thread's k-th, from element i on.
  template <class Visit>
  TESSERA_DEVICE void each(const Visit& visit) const {
    if constexpr (packs > 0) {
      TESSERA_UNROLL
      for (int k = 0; k < packs; ++k)
        if (at(k) < width_) visit(k, at(k));
    } else {
      for (int k = 0; at(k) < width_; ++k) visit(k, at(k));
    }
  }
  /// Calls visit(e) for each element of the vector from element i on.
  template <class Visit>
  TESSERA_DEVICE void elements(unsigned i, const Visit& visit) const {
    TESSERA_UNROLL
    for (int e = 0; e < kWide; ++e)
      if (packs > 0 || i + e < width_) visit(e);
  }
  TESSERA_DEVICE Packed read_packed(const T* row, unsigned i) const {
    return load_packed(row + i, aligned_, width_ - i);
  }
  TESSERA_DEVICE Pack<T, kWide> read(const T* row, unsigned i) const {
    return bits_as<Pack<T, kWide>>(read_packed(row, i));
  }
  TESSERA_DEVICE void write(T* row, unsigned i, const Pack<T, kWide>& values) const {
    store_part<kWide>(row + i, values, aligned_, width_ - i);
  }
  template <class W, class Operation>
  TESSERA_DEVICE W reduced(W value, Operation operation, W* room) const {
    return team_ == kWarp ? over_warp(value, operation) : over_block(value, operation, room);
  }

 private:
  TESSERA_DEVICE unsigned at(int k) const { return (static_cast<unsigned>(k) * team_ + lane_) * kWide; }
  const unsigned width_, team_, lane_;  // 32 bits: registers are scarce
  const bool aligned_;
};

/// The share's vectors of one row, in registers; with packs == 0 in memory.
template <class T, int packs>
class NormValues {
 public:
  using Share = NormShare<T, packs>;
  TESSERA_DEVICE void read(const Share& share, const T* from) {
    row_ = from;
    if constexpr (packs > 0) share.each([&](int k, unsigned i) { held_[k] = share.read_packed(from, i); });
  }
  TESSERA_DEVICE Pack<T, Share::kWide> at(const Share& share, int k, unsigned i) const {
    return bits_as<Pack<T, Share::kWide>>(packs > 0 ? held_[packs > 0 ? k : 0] : share.read_packed(row_, i));
  }
  /// Other values from now on: in registers, and in memory.
  TESSERA_DEVICE void replace(int k, const Pack<T, Share::kWide>& values) {
    if constexpr (packs > 0) held_[k] = bits_as<Packed>(values);
  }
  TESSERA_DEVICE void move_to(const T* row) { row_ = row; }

 private:
  Packed held_[packs > 0 ? packs : 1] = {};
  const T* row_ = nullptr;
};

/// Stores x + added in `sum`, and makes it the row's values. All loads come first: none can pass a store.
template <class T, int packs>
TESSERA_DEVICE void add_rows(const NormShare<T, packs>& share, NormValues<T, packs>& x, const T* added, T* sum) {
  NormValues<T, packs> other;
  other.read(share, added);
  share.each([&](int k, unsigned i) {
    const Pack<T, kVector<T>> left = x.at(share, k, i), right = other.at(share, k, i);
    Pack<T, kVector<T>> total = {};
    share.elements(i, [&](int e) { total.at[e] = from_opmath<T>(to_opmath(left.at[e]) + to_opmath(right.at[e])); });
    share.write(sum, i, total);
    x.replace(k, total);
  });
  x.move_to(sum);
}

template <class T, bool centered, int packs>
TESSERA_BOUNDED_KERNEL(kNormThreads, 2)
void norm_forward_kernel(NormForward<T> a, unsigned team, bool aligned) {
  using W = OpMath<T>;
  W* room = shared_memory<W>();
  const std::size_t row = block_index() * (thread_count() / team) + thread_index() / team;
  if (row >= a.rows) return;  // with its whole team
  const NormShare<T, packs> share(a.width, team, aligned);
  NormValues<T, packs> x;
  x.read(share, a.x + row * a.width);
  if (a.added != nullptr) add_rows(share, x, a.added + row * a.width, a.sum + row * a.width);
  W mean = 0;
  if (centered) {
    W sum = 0;
    share.each([&](int k, unsigned i) {
      const Pack<T, kVector<T>> values = x.at(share, k, i);
      share.elements(i, [&](int e) { sum += to_opmath(values.at[e]); });
    });
    mean = share.reduced(sum, Add{}, room) / static_cast<W>(a.width);
  }
  W squares = 0;  // around the mean, in a second pass, to avoid cancellation
  share.each([&](int k, unsigned i) {
    const Pack<T, kVector<T>> values = x.at(share, k, i);
    share.elements(i, [&](int e) {
      const W d = to_opmath(values.at[e]) - mean;
      squares = fused(d, d, squares);
    });
  });
  const W rstd = W(1) / root(share.reduced(squares, Add{}, room) / static_cast<W>(a.width) + a.eps);
  share.each([&](int k, unsigned i) {
    const Pack<T, kVector<T>> values = x.at(share, k, i), weight = share.read(a.weight, i);
    Pack<T, kVector<T>> bias = {}, y = {};
    if (a.bias) bias = share.read(a.bias, i);
    share.elements(i, [&](int e) {
      const W normalized = (to_opmath(values.at[e]) - mean) * rstd, w = to_opmath(weight.at[e]);
      y.at[e] = from_opmath<T>(a.bias ? fused(normalized, w, to_opmath(bias.at[e])) : normalized * w);
    });
    share.write(a.y + row * a.width, i, y);
  });
  if (thread_index() % team != 0) return;
  if (a.mean) a.mean[row] = mean;
  if (a.rstd) a.rstd[row] = rstd;
}

template <class T, bool centered>
void norm_forward(NativeStream stream, const NormForward<T>& a) {
  const NormTeams teams = norm_teams<T>(a.width);
  const bool is_aligned = teams.packs > 0 && aligned({a.x, a.added, a.sum, a.weight, a.bias, a.y});
  with_packs(teams.packs, [&](auto packs) {
    launch(stream,
           {.blocks = divided_up(a.rows, teams.block / teams.team),
            .threads = teams.block,
            .shared = kReduceRoom<OpMath<T>>},
           norm_forward_kernel<T, centered, packs>, a, teams.team, is_aligned);
  });
}

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
