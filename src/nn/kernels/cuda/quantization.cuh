// Quantization, with the same bits as on the host: to 8-bit floating point (kernels/fp8.h), of data sent between ranks
// (kernels/compression.h), and the decoding of four bits (nf4.h).
#pragma once

#include "tessera/nn/kernels/cuda/elementwise.cuh"
#include "tessera/nn/kernels/cuda/reduce.cuh"
#include "tessera/nn/kernels/fp8.h"
#include "tessera/nn/nf4.h"

namespace tessera::nn::cuda {

// Quantization to 8 bits takes three kernels, or four with a delayed scale: the largest magnitudes of tiles, the scale,
// the codes; the last kernel of a delayed scale records the largest magnitude, which the codes' kernel finds as it
// reads the tensor. A maximum does not depend on the order, so neither do the bits.

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

using kernels::CompressArgs;
using kernels::Compression;
using kernels::kCompressionBlock;
using kernels::SumCompressedArgs;

TESSERA_DEVICE bool is_finite(float x) { return (bits_as<std::uint32_t>(x) & 0x7f800000U) != 0x7f800000U; }
/// The encoding error; 0 for values that aren't finite.
TESSERA_DEVICE float lost(float value, float decoded) { return is_finite(value - decoded) ? value - decoded : 0.0F; }

template <class T>
struct CompressBf16Body {
  const T* in;
  bf16* out;
  float* error;
  float factor;
  template <int n>
  TESSERA_DEVICE void step(std::size_t i) const {
    for (int e = 0; e < n; ++e) {
      const float given = factor * to_opmath(in[i + e]);
      const float value = error ? given + error[i + e] : given;
      out[i + e] = from_opmath<bf16>(value);
      if (error) error[i + e] = lost(value, to_opmath(out[i + e]));
    }
  }
};

/// One thread block per block of values.
template <class T>
TESSERA_KERNEL void quantize_kernel(CompressArgs a, float* scales, std::int8_t* out) {
  constexpr float kLevels = 127, kSmallest = 1e-30F;
  const std::size_t i = block_index() * kCompressionBlock + thread_index();
  float value = 0;
  if (i < a.count) value = a.factor * to_opmath(static_cast<const T*>(a.in)[i]);
  if (i < a.count && a.error) value += a.error[i];
  // The largest magnitude, compared by bits: those of NaN are above infinity's.
  const auto magnitude = static_cast<int>(bits_as<std::uint32_t>(value) & 0x7fffffffU);
  const float most = bits_as<float>(over_block(magnitude, Largest{}, shared_memory<int>()));
  const bool usable = most >= kSmallest && is_finite(most);
  const float scale = usable ? most / kLevels : (most < kSmallest ? 0.0F : most - most);
  const float quantum = usable ? rintf(value * (kLevels / most)) : 0.0F;
  if (thread_index() == 0) scales[block_index()] = scale;
  if (i >= a.count) return;
  out[i] = static_cast<std::int8_t>(quantum);
  if (a.error) a.error[i] = lost(value, quantum * scale);
}

template <class T>
void compress(NativeStream stream, const CompressArgs& a) {
  const T* in = static_cast<const T*>(a.in);
  if (a.compression == Compression::bf16)
    return for_elements<4>(stream, a.count, {a.in, a.out},
                           CompressBf16Body<T>{in, static_cast<bf16*>(a.out), a.error, a.factor});
  const std::size_t blocks = divided_up(a.count, kCompressionBlock);
  auto* scales = static_cast<float*>(a.out);
  launch(stream, {.blocks = blocks, .threads = kCompressionBlock, .shared = kReduceRoom<int>}, quantize_kernel<T>, a,
         scales, reinterpret_cast<std::int8_t*>(scales + blocks));
}

template <class T>
struct SumCompressedBody {
  SumCompressedArgs args;
  std::size_t blocks;
  TESSERA_DEVICE float decoded(const unsigned char* source, std::size_t i) const {
    if (args.compression == Compression::bf16) return to_opmath(reinterpret_cast<const bf16*>(source)[i]);
    const float* scales = reinterpret_cast<const float*>(source);
    return static_cast<float>(reinterpret_cast<const std::int8_t*>(scales + blocks)[i]) * scales[i / kCompressionBlock];
  }
  template <int n>
  TESSERA_DEVICE void step(std::size_t i) const {
    for (int e = 0; e < n; ++e) {
      float sum = -0.0F;
      for (std::size_t s = 0; s < args.sources; ++s)
        sum += decoded(static_cast<const unsigned char*>(args.in) + s * args.stride, i + e);
      static_cast<T*>(args.out)[i + e] = from_opmath<T>(args.divisor == 1 ? sum : sum / args.divisor);
    }
  }
};

template <class T>
void sum_compressed(NativeStream stream, const SumCompressedArgs& a) {
  for_elements<4>(stream, a.count, {a.in, a.out}, SumCompressedBody<T>{a, divided_up(a.count, kCompressionBlock)});
}

template <class T>
struct DecodeNf4Body {
  const unsigned char* encoded;
  Nf4Layout layout;
  std::array<float, kNf4Levels.size()> levels;
  T* out;

  TESSERA_DEVICE float scale_of(std::size_t block) const {
    const auto* numbers = reinterpret_cast<const float*>(encoded);
    const auto code = static_cast<std::int8_t>(encoded[layout.scales + block]);
    const float scale = numbers[0] + numbers[1 + block / kNf4ScaleBlock] * static_cast<float>(code);
    return scale < 0 ? 0.0F : scale;
  }
  template <int n>
  TESSERA_DEVICE void step(std::size_t i) const {
    static_assert(kNf4Block % n == 0);  // so one scale applies to all n
    const float scale = scale_of(i / kNf4Block);
    Pack<T, n> values;
    for (int e = 0; e < n; ++e) {
      const unsigned pair = encoded[layout.codes + (i + e) / 2];
      values.at[e] = from_opmath<T>(static_cast<OpMath<T>>(scale * levels[(pair >> ((i + e) % 2 * 4)) & 15U]));
    }
    store<n>(out + i, values);
  }
};

template <class T>
void decode_nf4(NativeStream stream, const DecodeArgs& a) {
  for_elements<kVector<T>>(stream, static_cast<std::size_t>(a.count), {a.out},
                           DecodeNf4Body<T>{static_cast<const unsigned char*>(a.encoded), Nf4Layout(a.count),
                                            kNf4Levels, static_cast<T*>(a.out)});
}

}  // namespace tessera::nn::cuda
