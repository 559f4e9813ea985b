// Numbers in fewer bytes, for the way between ranks: rounded to bf16, or to 8 bits in blocks that have a scale each.
#pragma once

#include <cstddef>

#include "tessera/base/dtype.h"
#include "tessera/nn/thread_pool.h"

namespace tessera::nn::kernels {

/// int8: q * scale, with scale = the largest magnitude of a block / 127 and q rounded to the nearest (ties to even), so
/// a value is off by at most half a scale. A block whose largest magnitude is below 1e-30 becomes zeros; one with an
/// infinity or a NaN becomes NaN.
enum class Encoding : std::uint8_t { bf16, int8 };

/// Values of a block of int8: the scale is 1.6 % of the bytes then.
inline constexpr std::size_t kEncodingBlock = 256;

/// Bytes of `count` values. int8: the scales of all blocks, f32, then the values; the last block may be shorter.
constexpr std::size_t encoded_bytes(Encoding encoding, std::size_t count) {
  if (encoding == Encoding::bf16) return 2 * count;
  return count + (count + kEncodingBlock - 1) / kEncodingBlock * sizeof(float);
}

/// factor * in[count] -> out. With `error`, error[count] is added to these values first, and is then what rounding took
/// off them.
struct EncodeArgs {
  Encoding encoding = Encoding::bf16;
  const void* in = nullptr;
  base::DType from = base::DType::f32;  ///< f32, f16 or bf16
  std::size_t count = 0;
  void* out = nullptr;  ///< aligned to 4 bytes
  float* error = nullptr;
  float factor = 1;
};

/// out[count] = (source 0 + source 1 + ...) / divisor, added in f32 in this order and rounded to `to` once.
struct SumEncodedArgs {
  Encoding encoding = Encoding::bf16;
  const void* in = nullptr;  ///< aligned to 4 bytes
  std::size_t stride = 0;    ///< bytes from one source to the next, a multiple of 4
  std::size_t sources = 1;
  float divisor = 1;
  void* out = nullptr;
  base::DType to = base::DType::f32;  ///< f32, f16 or bf16
  std::size_t count = 0;
};

TESSERA_API void encode(ThreadPool& pool, const EncodeArgs& args);
TESSERA_API void sum_encoded(ThreadPool& pool, const SumEncodedArgs& args);

}  // namespace tessera::nn::kernels
