// Branch-free versions of the conversions in dtype.h, so that loops over them vectorize in the instruction set for
// which the caller is compiled, also that of a device. Equal to those of dtype.h on every input (tests run all of
// them).
#pragma once

#include <bit>
#include <cstdint>

#include "tessera/base/dtype.h"

// A function compiled for an instruction set can inline one that isn't, but a call to it would be costly.
#define TESSERA_HALF_INLINE [[gnu::always_inline]] constexpr inline

namespace tessera::base {

/// The value as f32, without change.
TESSERA_HALF_INLINE float to_float(float x) { return x; }

/// The value as f32; exact.
TESSERA_HALF_INLINE float to_float(bf16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }

/// The value as f32; exact.
TESSERA_HALF_INLINE float to_float(f16 x) {
  const std::uint32_t magnitude = static_cast<std::uint32_t>(x.bits & 0x7fffu) << 13;
  // The exponent's bias differs by 112; the product renormalizes subnormals exactly.
  const std::uint32_t scaled = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  const std::uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(scaled | special | (static_cast<std::uint32_t>(x.bits & 0x8000u) << 16));
}

/// Rounds to nearest even.
template <class T>
T from_float(float value) = delete;

/// The value itself.
template <>
TESSERA_HALF_INLINE float from_float<float>(float value) {
  return value;
}

/// As bf16::from_float().
template <>
TESSERA_HALF_INLINE bf16 from_float<bf16>(float value) {
  const std::uint32_t x = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
  const std::uint32_t nan = (x >> 16) | 0x40u;
  return bf16::of_bits(static_cast<std::uint16_t>((x & 0x7fffffffu) > 0x7f800000u ? nan : rounded));
}

/// As f16::from_float().
template <>
TESSERA_HALF_INLINE f16 from_float<f16>(float value) {
  const std::uint32_t x = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (x >> 16) & 0x8000u;
  const std::uint32_t magnitude = x & 0x7fffffffu;
  const std::uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  // Adding 1/2 puts a subnormal's bits at the end of the mantissa, rounded to nearest even by the addition itself.
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const std::uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  std::uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? nan : half;
  return f16::of_bits(static_cast<std::uint16_t>(sign | half));
}

}  // namespace tessera::base
