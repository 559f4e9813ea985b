// The two 8-bit floating-point formats of matrix products, and the scale of a tensor that is quantized to them.
//
// E4M3 (4 bits of exponent, 3 of mantissa, up to 448, no infinity) has more precision, for activations and weights;
// E5M2 (5 and 2, up to 57344) more range, for gradients of outputs. A tensor is stored as round(x * 2^e) and one f32
// factor 2^-e: a power of two, so that scaling rounds nothing.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace tessera::nn {

/// An 8-bit floating-point format, as torch.float8_e4m3fn and torch.float8_e5m2.
enum class Fp8Format : std::uint8_t {
  e4m3,  ///< bias 7; the largest code of each sign is NaN
  e5m2   ///< bias 15; infinities and NaN as in IEEE
};

/// The source of a tensor's scale.
enum class Fp8Scaling : std::uint8_t {
  current,  ///< the largest magnitude of the tensor itself
  delayed,  ///< the largest magnitude of the last kFp8History tensors in its place; of the tensor itself where there is
            ///< none yet
  none      ///< 1: for experiments that show what a scale is for
};

/// Earlier tensors whose largest magnitudes delayed scaling keeps.
inline constexpr std::size_t kFp8History = 16;

/// Extents of a product's operands are multiples of so many elements: 16 bytes.
inline constexpr std::size_t kFp8Multiple = 16;

/// DeviceProperties::generation of the first GPUs with such products: Ada.
inline constexpr int kFp8Generation = 89;

/// Bits of a format's mantissa.
constexpr std::uint32_t fp8_mantissa_bits(Fp8Format format) { return format == Fp8Format::e4m3 ? 3 : 2; }
/// What is subtracted from a format's exponent field.
constexpr std::uint32_t fp8_bias(Fp8Format format) { return format == Fp8Format::e4m3 ? 7 : 15; }
/// The code of the largest finite value, 448 or 57344.
constexpr std::uint32_t fp8_largest_code(Fp8Format format) { return format == Fp8Format::e4m3 ? 0x7e : 0x7b; }

/// The code of `value`, rounded to nearest, ties to even. Finite values beyond the largest saturate; infinities and NaN
/// become NaN, so that an overflow of the input stays visible.
constexpr std::uint8_t encode_fp8(Fp8Format format, float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 24U & 0x80U, magnitude = bits & 0x7fffffffU;
  if (magnitude >= 0x7f800000U) return static_cast<std::uint8_t>(sign | 0x7fU);
  const std::uint32_t mantissa = fp8_mantissa_bits(format), dropped = 23 - mantissa, rebias = 127 - fp8_bias(format);
  std::uint32_t code = 0;
  if (magnitude >= (rebias + 1) << 23U) {  // a normal number
    code = (magnitude + (1U << (dropped - 1)) - 1 + (magnitude >> dropped & 1U)) >> dropped;
    code -= rebias << mantissa;
  } else {  // the sum with 2^23 units of the smallest subnormal rounds to a whole number of them
    const std::uint32_t magic = (rebias + 1 - mantissa + 23) << 23U;
    code = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + std::bit_cast<float>(magic)) - magic;
  }
  const std::uint32_t largest = fp8_largest_code(format);
  return static_cast<std::uint8_t>(sign | (code < largest ? code : largest));
}

/// The value of a code; exact.
constexpr float decode_fp8(Fp8Format format, std::uint8_t code) {
  const std::uint32_t sign = (code & 0x80U) << 24U, magnitude = code & 0x7fU;
  const std::uint32_t mantissa = fp8_mantissa_bits(format), kept = 23 - mantissa, rebias = 127 - fp8_bias(format);
  if (magnitude > fp8_largest_code(format)) {
    const bool infinite = format == Fp8Format::e5m2 && magnitude == 0x7cU;
    return std::bit_cast<float>(sign | (infinite ? 0x7f800000U : 0x7fc00000U));
  }
  if (magnitude >> mantissa != 0) return std::bit_cast<float>(sign | ((magnitude << kept) + (rebias << 23U)));
  const float unit = std::bit_cast<float>((rebias + 1 - mantissa) << 23U);  // the smallest subnormal
  const float value = static_cast<float>(magnitude) * unit;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
}

/// The largest e, from -63 to 63, with amax * 2^e <= the largest value of the format; 0 where `amax` is 0 or not
/// finite. So the product of two factors 2^-e is a normal f32.
constexpr int fp8_exponent(Fp8Format format, float amax) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(amax) & 0x7fffffffU;
  if (bits == 0 || bits >= 0x7f800000U) return 0;
  const int largest = format == Fp8Format::e4m3 ? 8 : 15;  // both formats' largest value is 1.75 * 2^largest
  const int exponent = static_cast<int>(bits >> 23U) - 127;
  const int e = largest - exponent - ((bits & 0x7fffffU) > 0x600000U ? 1 : 0);
  return e > 63 ? 63 : e < -63 ? -63 : e;
}

/// 2^exponent, exponent from -126 to 127.
constexpr float fp8_power(int exponent) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23U);
}

}  // namespace tessera::nn
