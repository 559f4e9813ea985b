// Element types, and exact conversions of half-precision values.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "tessera/base/export.h"

namespace tessera::base {

/// An element type. The floating-point types come first (is_floating()). `boolean` is a byte of 0 or 1.
enum class DType : std::uint8_t { f32, f64, f16, bf16, i8, u8, i32, i64, u32, u64, i16, boolean };

/// All element types, in the order of DType.
inline constexpr std::array kDTypes = {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i8,  DType::u8,
                                       DType::i32, DType::i64, DType::u32, DType::u64,  DType::i16, DType::boolean};

/// Bytes of one element.
constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::i8:
    case DType::u8:
    case DType::boolean:
      return 1;
    case DType::f16:
    case DType::bf16:
    case DType::i16:
      return 2;
    case DType::f32:
    case DType::i32:
    case DType::u32:
      return 4;
    case DType::f64:
    case DType::i64:
    case DType::u64:
      return 8;
  }
  return 0;
}

/// True for f32, f64, f16 and bf16.
constexpr bool is_floating(DType dtype) { return dtype <= DType::bf16; }

/// "f32", "bf16", "bool", ...: the spelling of options, errors and JSON.
TESSERA_API std::string_view name_of(DType dtype);
/// The name in a safetensors file: "F32".
TESSERA_API std::string safetensors_name(DType dtype);

/// The inverse of name_of. Throws InvalidUsage listing the known names.
TESSERA_API DType parse_dtype(std::string_view name);

/// Whether no element is NaN or infinite. `elements` need not be aligned; an incomplete last element is ignored.
TESSERA_API bool all_finite(DType dtype, std::span<const std::byte> elements);

/// IEEE binary16, stored as bits. Conversions round to nearest even; NaN stays NaN, overflow gives infinity.
struct f16 {
  std::uint16_t bits = 0;  ///< sign, 5 bits of exponent, 10 bits of mantissa
  f16() = default;
  constexpr explicit f16(float value) : bits(from_float(value)) {}      ///< rounds to nearest even
  constexpr explicit operator float() const { return to_float(bits); }  ///< exact
  static constexpr f16 of_bits(std::uint16_t bits);        ///< the value with these bits, without conversion
  static constexpr std::uint16_t from_float(float value);  ///< the bits of the nearest value, ties to even
  static constexpr float to_float(std::uint16_t bits);     ///< the value of these bits; exact
};

/// bfloat16: the upper half of a binary32. Rounds to nearest even; NaN stays (a quiet) NaN.
struct bf16 {
  std::uint16_t bits = 0;  ///< sign, 8 bits of exponent, 7 bits of mantissa
  bf16() = default;
  constexpr explicit bf16(float value) : bits(from_float(value)) {}     ///< rounds to nearest even
  constexpr explicit operator float() const { return to_float(bits); }  ///< exact
  static constexpr bf16 of_bits(std::uint16_t bits);       ///< the value with these bits, without conversion
  static constexpr std::uint16_t from_float(float value);  ///< the bits of the nearest value, ties to even
  static constexpr float to_float(std::uint16_t bits);     ///< the value of these bits; exact
};

constexpr f16 f16::of_bits(std::uint16_t bits) {
  f16 value;
  value.bits = bits;
  return value;
}

constexpr std::uint16_t f16::from_float(float value) {
  const std::uint32_t x = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((x >> 16) & 0x8000u);
  const std::uint32_t magnitude = x & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to 2^16 or more
  if (magnitude >= 0x38800000u) {                                                   // a normal half
    const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }
  if (magnitude < 0x33000000u) return sign;  // up to half of the smallest subnormal: zero
  const std::uint32_t exponent = magnitude >> 23;
  const std::uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const std::uint32_t shift = 126u - exponent;  // 14 .. 24
  const std::uint32_t half = mantissa >> shift;
  const std::uint32_t rest = mantissa & ((1u << shift) - 1u);
  const std::uint32_t tie = 1u << (shift - 1u);
  const std::uint32_t up = (rest > tie || (rest == tie && (half & 1u))) ? 1u : 0u;
  return static_cast<std::uint16_t>(sign | (half + up));
}

constexpr float f16::to_float(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  std::uint32_t exponent = (bits >> 10) & 0x1fu;
  std::uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    if (mantissa == 0) return std::bit_cast<float>(sign);
    exponent = 1;
    while ((mantissa & 0x400u) == 0) {
      mantissa <<= 1;
      exponent -= 1;
    }
    mantissa &= 0x3ffu;
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

constexpr bf16 bf16::of_bits(std::uint16_t bits) {
  bf16 value;
  value.bits = bits;
  return value;
}

constexpr std::uint16_t bf16::from_float(float value) {
  const std::uint32_t x = std::bit_cast<std::uint32_t>(value);
  if ((x & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((x >> 16) | 0x40u);
  return static_cast<std::uint16_t>((x + 0x7fffu + ((x >> 16) & 1u)) >> 16);
}

constexpr float bf16::to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

/// DType of a C++ type: dtype_of<float> == DType::f32.
template <class T>
inline constexpr DType dtype_of = [] {
  static_assert(sizeof(T) == 0, "no DType stands for this type");
  return DType::f32;
}();
template <>
inline constexpr DType dtype_of<float> = DType::f32;  ///< IEEE binary32
template <>
inline constexpr DType dtype_of<double> = DType::f64;  ///< IEEE binary64
template <>
inline constexpr DType dtype_of<f16> = DType::f16;  ///< IEEE binary16
template <>
inline constexpr DType dtype_of<bf16> = DType::bf16;  ///< bfloat16
template <>
inline constexpr DType dtype_of<std::int8_t> = DType::i8;
template <>
inline constexpr DType dtype_of<std::uint8_t> = DType::u8;
template <>
inline constexpr DType dtype_of<std::int32_t> = DType::i32;
template <>
inline constexpr DType dtype_of<std::int64_t> = DType::i64;
template <>
inline constexpr DType dtype_of<std::uint32_t> = DType::u32;
template <>
inline constexpr DType dtype_of<std::uint64_t> = DType::u64;
template <>
inline constexpr DType dtype_of<std::int16_t> = DType::i16;
template <>
inline constexpr DType dtype_of<bool> = DType::boolean;  ///< a byte of 0 or 1
static_assert(sizeof(bool) == 1);

/// Calls function(T{}) with the C++ type of `dtype`.
template <class Function>
auto with_dtype(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::f32:
      return function(float{});
    case DType::f64:
      return function(double{});
    case DType::f16:
      return function(f16{});
    case DType::bf16:
      return function(bf16{});
    case DType::i8:
      return function(std::int8_t{});
    case DType::u8:
      return function(std::uint8_t{});
    case DType::i32:
      return function(std::int32_t{});
    case DType::i64:
      return function(std::int64_t{});
    case DType::u32:
      return function(std::uint32_t{});
    case DType::u64:
      return function(std::uint64_t{});
    case DType::i16:
      return function(std::int16_t{});
    case DType::boolean:
      break;
  }
  return function(bool{});
}

}  // namespace tessera::base
