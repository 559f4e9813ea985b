#include "tessera/nn/kernels/orthonormalize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "tessera/nn/random.h"

namespace tessera::nn::kernels {
namespace {

constexpr std::size_t kParts = kOrthonormalizeParts, kWarp = 32;

double total_of(std::array<double, kParts>& parts) {
  double total = 0;
  for (std::size_t warp = 0; warp < kParts; warp += kWarp) {
    for (std::size_t half = kWarp / 2; half > 0; half /= 2)
      for (std::size_t t = warp; t < warp + half; ++t) parts[t] += parts[t + half];
    total = warp == 0 ? parts[0] : total + parts[warp];
  }
  return total;
}

double dot(const OrthonormalizeArgs& m, std::size_t a, std::size_t b) {
  std::array<double, kParts> parts{};
  for (std::size_t first = 0; first < m.rows; first += kParts) {
    const float* const row = m.matrix + first * m.columns;
    for (std::size_t t = 0; t < std::min(kParts, m.rows - first); ++t)
      parts[t] += static_cast<double>(row[t * m.columns + a]) * static_cast<double>(row[t * m.columns + b]);
  }
  return total_of(parts);
}

}  // namespace

void orthonormalize(const OrthonormalizeArgs& m) {
  std::vector<float> fresh;
  for (std::size_t column = 0; column < m.columns; ++column) {
    const auto at = [&](std::size_t row) -> float& { return m.matrix[row * m.columns + column]; };
    if (column >= m.rows) {
      if (!std::isfinite(dot(m, column, column))) return;
      for (std::size_t row = 0; row < m.rows; ++row) at(row) = 0;
      continue;
    }
    for (std::uint64_t attempt = 0; attempt < kFreshColumns; ++attempt) {
      const double before = std::sqrt(dot(m, column, column));
      for (int pass = 0; pass < 2; ++pass)
        for (std::size_t other = 0; other < column; ++other) {
          const double along = dot(m, column, other);
          for (std::size_t row = 0; row < m.rows; ++row)
            at(row) = static_cast<float>(static_cast<double>(at(row)) -
                                         along * static_cast<double>(m.matrix[row * m.columns + other]));
        }
      const double length = std::sqrt(dot(m, column, column));
      if (!std::isfinite(length)) return;
      if (length > kDependent * before) {
        for (std::size_t row = 0; row < m.rows; ++row)
          at(row) = static_cast<float>(static_cast<double>(at(row)) / length);
        break;
      }
      fresh.resize(m.rows);
      fill_normal({"fresh", attempt, column * m.rows, (column + 1) * m.rows}, 0.0F, 1.0F, fresh.data());
      for (std::size_t row = 0; row < m.rows; ++row) at(row) = fresh[row];
    }
  }
}

}  // namespace tessera::nn::kernels
