// Quantization to 8-bit floating point (kernels/fp8.h), with the same bits as on the host.
//
// Three kernels, or four with a delayed scale: the largest magnitudes of tiles, the scale, the codes; the last kernel
// of a delayed scale records the largest magnitude, which the codes' kernel finds as it reads the tensor. A maximum
// does not depend on the order, so neither do the bits.
#pragma once

#include "tessera/nn/kernels/cuda/reduce.cuh"
#include "tessera/nn/kernels/fp8.h"

namespace tessera::nn::cuda {

using kernels::fp8_padded;
using kernels::Fp8QuantizeArgs;

inline constexpr std::size_t kFp8AmaxTile = 16384;  // elements whose largest magnitude a block finds
inline constexpr std::size_t kFp8Tile = 64;         // rows and columns that a block quantizes
inline constexpr std::size_t kFp8Pitch = 68;        // bytes of a column in shared memory: few share a bank

/// The bits of a finite value's magnitude, which are ordered as the magnitudes; 0 for others.
TESSERA_DEVICE std::uint32_t finite_magnitude(float x) {
  const std::uint32_t bits = bits_as<std::uint32_t>(x) & 0x7fffffffU;
  return bits < 0x7f800000U ? bits : 0;
}

/// Whether delayed scaling takes its scale from `history`: one of the tensors before this one is known.
TESSERA_DEVICE bool has_history(const float* history, bool updates) {
  for (std::size_t i = 0; i < kFp8History; ++i)
    if (history[updates ? i : i + 1] > 0) return true;
  return false;
}

/// tiles[block] = the bits of the largest magnitude of a tile. With a history that suffices, nothing is read.
template <class T>
TESSERA_KERNEL void fp8_amax_kernel(Fp8QuantizeArgs a, bool aligned, std::uint32_t* tiles) {
  constexpr int n = kVector<T>;
  const T* const x = static_cast<const T*>(a.in);
  const std::size_t begin = block_index() * kFp8AmaxTile, count = a.rows * a.columns;
  const std::size_t end = smaller(count, begin + kFp8AmaxTile);
  const bool idle = a.scaling == Fp8Scaling::delayed && has_history(a.history, a.updates);
  std::uint32_t most = 0;
  for (std::size_t i = begin + thread_index() * n; !idle && i < end; i += thread_count() * n) {
    const Pack<T, n> values = load_part<n>(x + i, aligned && i + n <= end, end - i);
    for (int e = 0; e < n; ++e) most = larger(most, finite_magnitude(to_opmath(values.at[e])));
  }
  most = over_block(most, Largest{}, shared_memory<std::uint32_t>());
  if (thread_index() == 0) tiles[block_index()] = most;
}

/// The largest of in[count], in every thread of the block.
TESSERA_DEVICE std::uint32_t largest_of(const std::uint32_t* in, std::size_t count) {
  std::uint32_t most = 0;
  for (std::size_t i = thread_index(); i < count; i += thread_count()) most = larger(most, in[i]);
  return over_block(most, Largest{}, shared_memory<std::uint32_t>());
}

/// One block: shifts the history, and computes the factor from it or from the tiles.
TESSERA_PLAIN_KERNEL void fp8_scale_kernel(Fp8QuantizeArgs a, const std::uint32_t* tiles, std::size_t count) {
  const float own = bits_as<float>(largest_of(tiles, count));
  if (thread_index() != 0) return;
  float amax = own;
  if (a.scaling == Fp8Scaling::delayed) {
    if (a.updates) {
      for (std::size_t i = kFp8History; i > 0; --i) a.history[i] = a.history[i - 1];
      a.history[0] = 0;
    }
    float before = 0;
    for (std::size_t i = 1; i <= kFp8History; ++i) before = larger(before, a.history[i]);
    if (before > 0) amax = before;
  }
  *a.descale = fp8_power(-fp8_exponent(a.format, amax));
}

/// One block: the amax of the tensor becomes the newest of the history.
TESSERA_PLAIN_KERNEL void fp8_record_kernel(float* history, const std::uint32_t* tiles, std::size_t count) {
  const std::uint32_t most = largest_of(tiles, count);
  if (thread_index() == 0) history[0] = bits_as<float>(most);
}

/// A thread quantizes 16 elements of a row, and stores 16 of a column that others have quantized.
template <class T>
TESSERA_KERNEL void fp8_quantize_kernel(Fp8QuantizeArgs a, bool aligned, std::uint32_t* tiles) {
  constexpr int n = kVector<T>;
  auto* const shared = shared_memory<unsigned char>();  // [columns, kFp8Pitch]; before it kReduceRoom bytes
  unsigned char* const tile = shared + kReduceRoom<std::uint32_t>;
  const std::size_t across = divided_up(a.columns, kFp8Tile), padded = fp8_padded(a.rows);
  const std::size_t first_row = block_index() / across * kFp8Tile, first_column = block_index() % across * kFp8Tile;
  const std::size_t line = thread_index() / 4, part = thread_index() % 4 * kFp8Multiple;
  const std::size_t row = first_row + line, column = first_column + part;
  const float scale = 1 / *a.descale;  // a power of two
  std::uint32_t most = 0;
  Pack<std::uint8_t, kFp8Multiple> codes = {};
  if (row < a.rows && column < a.columns) {
    const T* const from = static_cast<const T*>(a.in) + row * a.columns + column;
    TESSERA_UNROLL
    for (int v = 0; v < static_cast<int>(kFp8Multiple); v += n) {
      const Pack<T, n> values = load_part<n>(from + v, aligned, n);
      for (int e = 0; e < n; ++e) {
        const float value = to_opmath(values.at[e]);
        most = larger(most, finite_magnitude(value));
        codes.at[v + e] = encode_fp8(a.format, value * scale);
      }
    }
    if (a.out) store<static_cast<int>(kFp8Multiple)>(a.out + row * a.columns + column, codes);
  }
  if (tiles) {
    most = over_block(most, Largest{}, reinterpret_cast<std::uint32_t*>(shared));
    if (thread_index() == 0) tiles[block_index()] = most;
  }
  if (a.transposed == nullptr) return;
  TESSERA_UNROLL
  for (std::size_t e = 0; e < kFp8Multiple; ++e) tile[(part + e) * kFp8Pitch + line] = codes.at[e];
  sync_block();
  if (first_column + line >= a.columns || first_row + part >= padded) return;
  TESSERA_UNROLL
  for (std::size_t e = 0; e < kFp8Multiple; ++e) codes.at[e] = tile[line * kFp8Pitch + part + e];
  store<static_cast<int>(kFp8Multiple)>(a.transposed + (first_column + line) * padded + first_row + part, codes);
}

/// The thread blocks of the kernels.
inline std::size_t fp8_amax_blocks(const Fp8QuantizeArgs& a) { return divided_up(a.rows * a.columns, kFp8AmaxTile); }
inline std::size_t fp8_quantize_blocks(const Fp8QuantizeArgs& a) {
  return divided_up(a.rows, kFp8Tile) * divided_up(a.columns, kFp8Tile);
}
/// Bytes of scratch.
inline std::size_t fp8_scratch(const Fp8QuantizeArgs& a) {
  return larger(fp8_amax_blocks(a), fp8_quantize_blocks(a)) * sizeof(std::uint32_t);
}

template <class T>
void fp8_quantize(NativeStream stream, const Fp8QuantizeArgs& a, std::uint32_t* tiles) {
  constexpr std::size_t kRoom = kReduceRoom<std::uint32_t>;
  const bool is_aligned = aligned({a.in}), records = a.scaling == Fp8Scaling::delayed && a.updates;
  const std::size_t parts = a.scaling == Fp8Scaling::none ? 0 : fp8_amax_blocks(a);
  const std::size_t blocks = fp8_quantize_blocks(a);
  launch(stream, {.blocks = parts, .shared = kRoom}, fp8_amax_kernel<T>, a, is_aligned, tiles);
  launch(stream, {.shared = kRoom}, fp8_scale_kernel, a, tiles, parts);
  launch(stream, {.blocks = blocks, .shared = kRoom + kFp8Tile * kFp8Pitch}, fp8_quantize_kernel<T>, a, is_aligned,
         records ? tiles : nullptr);
  if (records) launch(stream, {.shared = kRoom}, fp8_record_kernel, a.history, tiles, blocks);
}

}  // namespace tessera::nn::cuda
