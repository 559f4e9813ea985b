#include "tessera/base/dtype.h"

#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/base/shape.h"

namespace tessera::base {
namespace {

constexpr std::array<std::string_view, kDTypes.size()> kNames = {"f32", "f64", "f16", "bf16", "i8",  "u8",
                                                                 "i32", "i64", "u32", "u64",  "i16", "bool"};

/// A value is finite unless all bits of its exponent are set.
template <class Bits>
bool none_has(Bits exponent, std::span<const std::byte> elements) {
  bool found = false;
  for (std::size_t i = 0; i + sizeof(Bits) <= elements.size(); i += sizeof(Bits)) {
    Bits bits;
    std::memcpy(&bits, elements.data() + i, sizeof(Bits));
    found |= (bits & exponent) == exponent;
  }
  return !found;
}

}  // namespace

std::string_view name_of(DType dtype) { return kNames[static_cast<std::size_t>(dtype)]; }

std::string safetensors_name(DType dtype) {
  std::string name(name_of(dtype));
  for (char& letter : name)  // std::toupper depends on the locale: Turkish has another I
    if (letter >= 'a' && letter <= 'z') letter = static_cast<char>(letter - 'a' + 'A');
  return name;
}

DType parse_dtype(std::string_view name) { return static_cast<DType>(parse_name(name, "dtype", kNames)); }

bool all_finite(DType dtype, std::span<const std::byte> elements) {
  switch (dtype) {
    case DType::f32:
      return none_has<std::uint32_t>(0x7f800000U, elements);
    case DType::f64:
      return none_has<std::uint64_t>(0x7ff0000000000000U, elements);
    case DType::f16:
      return none_has<std::uint16_t>(0x7c00U, elements);
    case DType::bf16:
      return none_has<std::uint16_t>(0x7f80U, elements);
    default:
      return true;
  }
}

std::int64_t count_of(const Shape& shape) {
  constexpr std::int64_t kMost = PTRDIFF_MAX / 8;  // of the widest type
  std::int64_t count = 1;
  for (const std::int64_t extent : shape)
    if (extent < 0 || __builtin_mul_overflow(count, extent, &count) || count > kMost)
      throw InvalidUsage("shape " + to_string(shape) +
                         ": needs extents of 0 or more, and no more elements than memory can "
                         "hold");
  return count;
}

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

}  // namespace tessera::base
