// Sums over a block of threads, in an order that depends only on the block size.
#pragma once

#include "tessera/nn/kernels/cuda/elementwise.cuh"
#include "tessera/nn/kernels/cuda/turns.cuh"

namespace tessera::nn::cuda {

struct Add {
  template <class W>
  TESSERA_DEVICE W operator()(W a, W b) const {
    return a + b;
  }
};
struct Largest {
  template <class W>
  TESSERA_DEVICE W operator()(W a, W b) const {
    return larger(a, b);
  }
};

/// Combines the lanes' values; returns the result in every lane. All lanes use the same tree since both operations
/// commute.
template <class W, class Operation>
TESSERA_DEVICE W over_warp(W value, Operation operation) {
  TESSERA_UNROLL
  for (unsigned mask = kWarp / 2; mask > 0; mask /= 2) value = operation(value, shuffle_xor(value, mask));
  return value;
}

/// Combines the threads' values; returns the result in every thread. `room`: 32 values of shared memory for exclusive
/// use during the call. All threads of the block must call it; the block consists of whole warps.
template <class W, class Operation>
TESSERA_DEVICE W over_block(W value, Operation operation, W* room) {
  value = over_warp(value, operation);
  const unsigned warp = thread_index() / kWarp, warps = thread_count() / kWarp;
  if (thread_index() % kWarp == 0) room[warp] = value;
  sync_block();
  W total = room[0];
  for (unsigned w = 1; w < warps; ++w) total = operation(total, room[w]);
  sync_block();
  return total;
}

/// Shared memory bytes of over_block.
template <class W>
inline constexpr std::size_t kReduceRoom = kWarp * sizeof(W);

/// Partial results of the infinity norm combine by the maximum, where NaN counts as the largest; those of other norms
/// by addition.
struct LargestOrNaN {
  TESSERA_DEVICE double operator()(double a, double b) const { return b > a || b != b ? b : a; }
};
template <class Operation>
TESSERA_DEVICE double over_threads(const double* in, std::size_t count, Operation operation) {
  double total = 0;
  for (std::size_t i = thread_index(); i < count; i += thread_count()) total = operation(total, in[i]);
  return over_block(total, operation, shared_memory<double>());
}

/// Adds one element to a partial result of a norm.
TESSERA_DEVICE double add_to_norm(kernels::Norm norm, double part, double value) {
  const double magnitude = value < 0 ? -value : value;
  switch (norm) {
    case kernels::Norm::one:
      return part + magnitude;
    case kernels::Norm::two:
      return fused(value, value, part);
    case kernels::Norm::three:
      return fused(value * value, magnitude, part);
    default:
      return LargestOrNaN{}(part, magnitude);
  }
}

/// Elements of a slice whose partial norm, in f64, a block computes.
inline constexpr std::size_t kNormTile = 16384;
/// At least one: an empty slice has a partial norm, too.
template <class T>
std::size_t norm_tiles(const NormParts<T>& a) {
  return larger(std::size_t{1}, divided_up(a.count, kNormTile));
}

/// The partial norm of a tile. A thread adds vectors of elements, also where `aligned` is false: no address shows in
/// the bits.
template <class T>
TESSERA_DEVICE double norm_of_tile(kernels::Norm norm, const T* x, std::size_t count, bool aligned) {
  constexpr int n = kVector<T>;
  double part = 0;
  for (std::size_t i = thread_index() * n; i < count; i += thread_count() * n) {
    const Pack<T, n> values = load_part<n>(x + i, aligned && i + n <= count, count - i);
    for (int e = 0; e < n; ++e) part = add_to_norm(norm, part, static_cast<double>(to_opmath(values.at[e])));
  }
  return norm == kernels::Norm::infinity ? over_block(part, LargestOrNaN{}, shared_memory<double>())
                                         : over_block(part, Add{}, shared_memory<double>());
}

/// Blocks = slices x tiles. The last block of a slice combines its tiles in their order, whichever block that is: each
/// thread combines every 256th, then the block. `parts`: [slices, tiles].
template <class T>
TESSERA_KERNEL void norm_kernel(NormParts<T> a, std::size_t tiles, bool aligned, double* parts) {
  const std::size_t slice = block_index() / tiles, tile = block_index() % tiles, begin = tile * kNormTile;
  const double part = norm_of_tile(a.norm, a.x + slice * a.count + begin, smaller(a.count - begin, kNormTile), aligned);
  if (tiles == 1) {
    if (thread_index() == 0) a.out[slice] = part;
    return;
  }
  parts += slice * tiles;
  std::uint32_t* const before = shared_memory<std::uint32_t>();  // blocks that came before this one
  if (thread_index() == 0) {
    parts[tile] = part;
    *before = arrive(a.counters + slice);
  }
  sync_block();
  const bool last = *before + 1 == tiles;
  sync_block();  // the sum writes where `before` is
  if (!last) return;
  const double total = a.norm == kernels::Norm::infinity ? over_threads(parts, tiles, LargestOrNaN{})
                                                         : over_threads(parts, tiles, Add{});
  if (thread_index() > 0) return;
  a.out[slice] = total;
  a.counters[slice] = 0;
}

template <class T>
std::size_t norm_scratch(const NormParts<T>& a) {
  return a.slices * norm_tiles(a) * sizeof(double);
}

/// `scratch`: norm_scratch(a) bytes.
template <class T>
void norm_parts(NativeStream stream, const NormParts<T>& a, double* scratch) {
  const bool vectors = aligned({a.x}) && (a.slices == 1 || a.count % kVector<T> == 0);
  launch(stream, {.blocks = a.slices * norm_tiles(a), .threads = 256, .shared = kReduceRoom<double>}, norm_kernel<T>, a,
         norm_tiles(a), vectors, scratch);
}

}  // namespace tessera::nn::cuda
