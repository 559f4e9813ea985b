#include "tessera/base/shape.h"

#include "tessera/base/error.h"

namespace tessera::base {

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
