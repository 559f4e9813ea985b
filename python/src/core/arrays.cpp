#include "core/arrays.h"

#include <optional>
#include <string>

#include "tessera/base/error.h"

namespace tessera::python {
namespace {

using Code = nb::dlpack::dtype_code;

std::optional<base::DType> dtype_of(const nb::dlpack::dtype& dtype) {
  for (const base::DType known : base::kDTypes) {
    const auto code = [known] {
      switch (known) {
        case base::DType::f32:
        case base::DType::f64:
        case base::DType::f16:
          return Code::Float;
        case base::DType::bf16:
          return Code::Bfloat;
        case base::DType::boolean:
          return Code::Bool;
        case base::DType::u8:
        case base::DType::u32:
        case base::DType::u64:
          return Code::UInt;
        default:
          return Code::Int;
      }
    }();
    if (dtype.code == static_cast<std::uint8_t>(code) && dtype.bits == 8 * base::size_of(known) && dtype.lanes == 1)
      return known;
  }
  return std::nullopt;
}

nb::dlpack::dtype dlpack_of(base::DType dtype) {
  for (const Code code : {Code::Float, Code::Bfloat, Code::Bool, Code::UInt, Code::Int}) {
    const nb::dlpack::dtype made{static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(8 * base::size_of(dtype)),
                                 1};
    if (dtype_of(made) == dtype) return made;
  }
  throw base::Unsupported("arrays of " + std::string(base::name_of(dtype)) + " have no type in DLPack");
}

base::DType checked_dtype(const nb::dlpack::dtype& dtype) {
  if (const auto known = dtype_of(dtype)) return *known;
  std::string names;
  for (const base::DType known : base::kDTypes) names += " " + std::string(base::name_of(known));
  throw base::Unsupported("the array's elements have " + std::to_string(dtype.bits) +
                          " bits of a type that operations don't have; they have" + names);
}

}  // namespace

comm::ConstView view_of(const InputArray& array) {
  return {array.data(), array.size(), checked_dtype(array.dtype()), {}};
}

comm::View view_of(const OutputArray& array) { return {array.data(), array.size(), checked_dtype(array.dtype()), {}}; }

nb::ndarray<nb::array_api> array_of(base::Buffer memory, std::size_t count, base::DType dtype) {
  auto held = std::make_unique<base::Buffer>(std::move(memory));
  void* const data = held->data();
  const nb::capsule owner(held.get(), [](void* buffer) noexcept { delete static_cast<base::Buffer*>(buffer); });
  held.release();
  return {data, {count}, owner, {}, dlpack_of(dtype)};
}

}  // namespace tessera::python
