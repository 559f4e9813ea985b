// How elements are divided among ranks if the caller doesn't specify it.
#pragma once

#include <algorithm>
#include <cstddef>

#include "tessera/comm/base_names.h"

namespace tessera::comm {

/// A contiguous range of elements.
struct Slice {
  std::size_t offset = 0;  ///< first element
  std::size_t count = 0;   ///< number of elements
};

/// Slice `index` when `count` elements are divided into `parts` contiguous slices. Their lengths differ by at most one,
/// the longer ones first.
constexpr Slice slice_of(std::size_t count, int parts, int index) {
  const auto n = static_cast<std::size_t>(parts);
  const auto i = static_cast<std::size_t>(index);
  const std::size_t base = count / n;
  const std::size_t longer = count % n;
  return {i * base + std::min(i, longer), base + (i < longer ? 1 : 0)};
}

/// The rank m where the sum tree splits the ranks a .. b: sum(a..b) = sum(a..m) + sum(m..b).
constexpr std::size_t tree_middle(std::size_t a, std::size_t b) { return a + (b - a) / 2; }

}  // namespace tessera::comm
