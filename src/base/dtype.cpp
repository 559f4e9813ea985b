#include "tessera/base/dtype.h"

#include <array>
#include <string>

#include "tessera/base/error.h"

namespace tessera::base {
namespace {
constexpr std::array<std::string_view, 10> kNames = {"f32", "f64", "f16", "bf16", "i8", "u8", "i32", "i64", "u32", "u64"};
}

std::string_view name_of(DType dtype) { return kNames[static_cast<std::size_t>(dtype)]; }

DType parse_dtype(std::string_view name) {
  std::string known;
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<DType>(i);
    known += (i ? " " : "") + std::string(kNames[i]);
  }
  throw InvalidUsage("unknown dtype '" + std::string(name) + "'; known: " + known);
}

}  // namespace tessera::base
