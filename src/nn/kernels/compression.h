// Lossy compression of data sent between ranks: values rounded to bf16, or to int8 in blocks with one scale each.
#pragma once

#include <cstddef>

#include "tessera/base/dtype.h"
#include "tessera/nn/thread_pool.h"

namespace tessera::nn::kernels {

/// int8: q * scale, with scale = the largest magnitude of a block / 127 and q rounded to nearest (ties to even), so the
/// error of a value is at most half a scale. A block whose largest magnitude is below 1e-30 becomes zeros; a block with
/// an infinity or a NaN becomes NaN.
enum class Compression : std::uint8_t {
  bf16,  ///< rounded to nearest, ties to even; no scales
  int8   ///< q * scale, in blocks of kCompressionBlock values
};

/// Values per int8 block; the scales are then 1.6 % of the bytes.
inline constexpr std::size_t kCompressionBlock = 256;

/// Bytes of `count` encoded values. int8: the f32 scales of all blocks, then the values; the last block may be shorter.
constexpr std::size_t compressed_bytes(Compression compression, std::size_t count) {
  if (compression == Compression::bf16) return 2 * count;
  return count + (count + kCompressionBlock - 1) / kCompressionBlock * sizeof(float);
}

/// out = factor * in[count], encoded. If `error` is not null, error[count] is added to these values before encoding and
/// then set to the rounding error (error feedback).
struct CompressArgs {
  Compression compression = Compression::bf16;  ///< compression of `out`
  const void* in = nullptr;                     ///< [count]
  base::DType from = base::DType::f32;          ///< f32, f16 or bf16
  std::size_t count = 0;                        ///< values
  void* out = nullptr;                          ///< aligned to 4 bytes
  float* error = nullptr;                       ///< [count] of f32, or null: no error feedback
  float factor = 1;                             ///< applied before encoding
};

/// out[count] = (source 0 + source 1 + ...) / divisor, added in f32 in this order and rounded once to `to`.
struct SumCompressedArgs {
  Compression compression = Compression::bf16;  ///< compression of all sources
  const void* in = nullptr;                     ///< aligned to 4 bytes
  std::size_t stride = 0;                       ///< bytes from one source to the next, a multiple of 4
  std::size_t sources = 1;                      ///< how many encodings lie at `in`
  float divisor = 1;                            ///< 1: the plain sum
  void* out = nullptr;                          ///< [count]
  base::DType to = base::DType::f32;            ///< f32, f16 or bf16
  std::size_t count = 0;                        ///< values of each source
};

/// Compresses values as CompressArgs says.
TESSERA_API void compress(ThreadPool& pool, const CompressArgs& args);
/// Decompresses and adds as SumCompressedArgs says.
TESSERA_API void sum_compressed(ThreadPool& pool, const SumCompressedArgs& args);

}  // namespace tessera::nn::kernels
