// Orthonormalizes the columns of a thin matrix.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/base/export.h"

namespace tessera::nn::kernels {

/// Gram-Schmidt, column by column: each column's projections on the previous columns are subtracted twice (the second
/// pass removes rounding residue), and the column is divided by its length. A column that depends on the previous ones
/// carries no information: it is replaced by normal numbers of a fixed seed, so that a lost direction can recover.
/// Columns beyond the number of rows become zero: no direction is left for them. If a length isn't finite, the function
/// stops at that column, so the error stays visible.
///
/// Sums over rows are computed in f64, in the same order on all devices: 256 partial sums, of rows t, t + 256, .. in
/// this order; each 32 of them combined by halves (t and t + 16, then t and t + 8, ..); and the resulting eight in
/// order.
struct OrthonormalizeArgs {
  float* matrix = nullptr;  ///< [rows, columns]
  std::size_t rows = 0,     ///< rows of the matrix
      columns = 0;          ///< columns of the matrix
};

/// Number of partial sums of a sum over rows.
inline constexpr std::size_t kOrthonormalizeParts = 256;
inline constexpr double kDependent = 1e-6;         ///< smallest remaining fraction of a column's length
inline constexpr std::uint64_t kFreshColumns = 3;  ///< replacements tried; stream "fresh" of seeds 0, 1, 2

/// The host's implementation, on one thread; updates the matrix in place.
TESSERA_API void orthonormalize(const OrthonormalizeArgs& args);

}  // namespace tessera::nn::kernels
