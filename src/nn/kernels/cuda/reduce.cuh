// Sums over a block of threads, in an order that depends only on the block size.
#pragma once

#include "tessera/nn/kernels/cuda/elementwise.cuh"

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

/// Elements per partial result of a norm, which is computed in f64.
inline constexpr std::size_t kNormTile = 16384;
/// A thread adds vectors of elements, also where `aligned` is false: no address shows in the bits.
template <class T>
TESSERA_KERNEL void norm_kernel(kernels::Norm norm, const T* x, std::size_t count, bool aligned, double* tiles) {
  constexpr int n = kVector<T>;
  const std::size_t begin = block_index() * kNormTile;
  const std::size_t end = smaller(count, begin + kNormTile);
  double part = 0;
  for (std::size_t i = begin + thread_index() * n; i < end; i += thread_count() * n) {
    const Pack<T, n> values = load_part<n>(x + i, aligned && i + n <= end, end - i);
    for (int e = 0; e < n; ++e) part = add_to_norm(norm, part, static_cast<double>(to_opmath(values.at[e])));
  }
  part = norm == kernels::Norm::infinity ? over_block(part, LargestOrNaN{}, shared_memory<double>())
                                         : over_block(part, Add{}, shared_memory<double>());
  if (thread_index() == 0) tiles[block_index()] = part;
}

/// out[0] = the combined partial results in[count]; one block: each thread combines every 256th, then the block.
TESSERA_PLAIN_KERNEL void norm_total_kernel(kernels::Norm norm, const double* in, std::size_t count, double* out) {
  const double total =
      norm == kernels::Norm::infinity ? over_threads(in, count, LargestOrNaN{}) : over_threads(in, count, Add{});
  if (thread_index() == 0) out[0] = total;
}

inline std::size_t norm_scratch(std::size_t count) { return divided_up(count, kNormTile) * sizeof(double); }

/// `scratch`: norm_scratch(count) bytes.
template <class T>
void norm_part(NativeStream stream, kernels::Norm norm, const T* x, std::size_t count, double* scratch, double* out) {
  const std::size_t tiles = divided_up(count, kNormTile);
  launch(stream, {.blocks = tiles, .threads = 256, .shared = kReduceRoom<double>}, norm_kernel<T>, norm, x, count,
         aligned({x}), scratch);
  launch(stream, {.blocks = 1, .threads = 256, .shared = kReduceRoom<double>}, norm_total_kernel, norm,
         static_cast<const double*>(scratch), tiles, out);
}

}  // namespace tessera::nn::cuda
