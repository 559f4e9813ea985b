// Layer norm and RMS norm over the last dimension. A team of threads, a warp or a whole block, holds a row in registers
// as vectors of 16 bytes, so every array is read and written once. The gradients of weight and bias are summed in the
// same pass, over tiles of rows (columns.cuh). The width alone decides which thread adds which elements: neither the
// grid nor an address shows in the bits.
#pragma once

#include "tessera/nn/kernels/cuda/columns.cuh"
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

}  // namespace tessera::nn::cuda
