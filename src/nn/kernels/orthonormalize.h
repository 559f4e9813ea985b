// Columns of a thin matrix become orthonormal.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/base/export.h"

namespace tessera::nn::kernels {

/// Gram-Schmidt, column by column: each loses what lies along those before it, twice (the second time what rounding
/// left), and is divided by its length. One that depends on those before it says nothing: normal numbers of a fixed
/// seed take its place, so that a direction that was lost can come back. Where a length isn't finite, nothing can be
/// made of the matrix: the rest stays as it is, and it shows.
///
/// Sums over rows are formed in f64, alike on all devices: 256 parts, of rows t, t + 256, .. in this order; each 32 of
/// them by halves (t and t + 16, then t and t + 8, ..); and those eight in their order.
struct OrthonormalizeArgs {
  float* matrix = nullptr;  ///< [rows, columns]
  std::size_t rows = 0, columns = 0;
};

inline constexpr std::size_t kOrthonormalizeParts = 256;
inline constexpr double kDependent = 1e-6;         ///< of a column: less than this of its length is left
inline constexpr std::uint64_t kFreshColumns = 3;  ///< tried; their numbers are stream "fresh" of seeds 0, 1, 2

TESSERA_API void orthonormalize(const OrthonormalizeArgs& args);

}  // namespace tessera::nn::kernels
