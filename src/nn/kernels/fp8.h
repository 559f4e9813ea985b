// Quantization of matrices to 8-bit floating point (nn/fp8.h), and products of quantized matrices.
//
// A product reads both operands with rows along the sum, the only layout that GPUs multiply. So a matrix is quantized
// as it is, transposed, or both, in one pass.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/base/dtype.h"
#include "tessera/base/export.h"
#include "tessera/nn/fp8.h"
#include "tessera/nn/products.h"
#include "tessera/nn/thread_pool.h"

namespace tessera::nn::kernels {

/// The next multiple of kFp8Multiple.
constexpr std::size_t fp8_padded(std::size_t extent) {
  return (extent + kFp8Multiple - 1) / kFp8Multiple * kFp8Multiple;
}

/// out = encode(in * 2^e), e = fp8_exponent(format, amax), and descale[0] = 2^-e. An amax is the largest magnitude of a
/// tensor's finite values; `scaling` says of which tensor. Computed on the device: nothing waits for the host.
struct Fp8QuantizeArgs {
  const void* in = nullptr;                  ///< [rows, columns]
  base::DType dtype = base::DType::f32;      ///< dtype of `in`: f32, f16 or bf16
  std::size_t rows = 0,                      ///< rows of `in`
      columns = 0;                           ///< columns of `in`, a multiple of kFp8Multiple
  Fp8Format format = Fp8Format::e4m3;        ///< format of the codes
  Fp8Scaling scaling = Fp8Scaling::current;  ///< tensors whose amax counts
  float* history = nullptr;                  ///< delayed: [1 + kFp8History] amaxes, the newest first
  bool updates = false;                      ///< delayed: first shifts the history and puts the amax of `in` at 0
  float* descale = nullptr;                  ///< [1]
  std::uint8_t* out = nullptr;               ///< [rows, columns], aligned to 16 bytes; or null
  std::uint8_t* transposed = nullptr;        ///< [columns, fp8_padded(rows)], likewise, padded with zeros; or null
};

/// An operand of a product: codes [rows, k] and their factor.
struct Fp8Operand {
  const std::uint8_t* codes = nullptr;  ///< aligned to 16 bytes
  Fp8Format format = Fp8Format::e4m3;   ///< format of the codes
  const float* descale = nullptr;       ///< [1], aligned to 16 bytes, as cuBLASLt 13.1 requires
};

/// c[m, n] = a[m, k] * b[n, k]^T * a.descale * b.descale (+ bias[n]) (+ c); the sums are f32, rounded once to `dtype`.
struct Fp8ProductArgs {
  Fp8Operand a;                          ///< [m, k]; at most one of the two is E5M2
  Fp8Operand b;                          ///< [n, k]
  std::size_t m = 0,                     ///< rows of c
      n = 0,                             ///< columns of c, a multiple of kFp8Multiple
      k = 0;                             ///< extent of the sums, a multiple of kFp8Multiple
  base::DType dtype = base::DType::f32;  ///< dtype of c and the bias: f32, f16 or bf16
  const void* bias = nullptr;            ///< [n], or null
  void* c = nullptr;                     ///< [m, n]
  bool accumulate = false;               ///< true: adds to c
  bool fast = false;                     ///< the device may keep fewer bits of the sums; for forward products
};

/// Throws InvalidUsage for extents that aren't multiples of kFp8Multiple, and for delayed scaling without a history.
TESSERA_API void check(const Fp8QuantizeArgs& args);
/// Throws InvalidUsage for extents that aren't multiples of kFp8Multiple, for two operands in E5M2, and for
/// factors that aren't aligned.
TESSERA_API void check(const Fp8ProductArgs& args);

/// Quantizes as Fp8QuantizeArgs says.
TESSERA_API void fp8_quantize(ThreadPool& pool, const Fp8QuantizeArgs& args);
/// Multiplies as Fp8ProductArgs says. The order of the sums depends only on the extents.
TESSERA_API void fp8_product(ThreadPool& pool, const Fp8ProductArgs& args, Products products = Products::library);

}  // namespace tessera::nn::kernels
