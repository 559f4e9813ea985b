// Extents and ranges of tensors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/base/export.h"

namespace tessera::base {

/// Extents, outermost first. Tensors are contiguous, row-major. An empty shape is a scalar.
using Shape = std::vector<std::int64_t>;
/// Product of the extents. Throws InvalidUsage for a negative extent, or more elements than memory can hold.
TESSERA_API std::int64_t count_of(const Shape& shape);
/// "[2, 3]".
TESSERA_API std::string to_string(const Shape& shape);

/// Elements [begin, end) of a tensor.
struct ElementRange {
  std::int64_t begin = 0;                             ///< first element
  std::int64_t end = 0;                               ///< after the last element
  std::int64_t count() const { return end - begin; }  ///< number of elements
};

}  // namespace tessera::base
