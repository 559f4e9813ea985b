// Orthonormalizes the columns of a thin matrix (kernels/orthonormalize.h), with the same bits as on the host.
#pragma once

#include "tessera/nn/kernels/cuda/random.cuh"
#include "tessera/nn/kernels/cuda/reduce.cuh"
#include "tessera/nn/kernels/orthonormalize.h"

namespace tessera::nn::cuda {

using kernels::OrthonormalizeArgs;

/// The matrix as seen by a block of threads: a thread reads and writes only its own rows.
struct BlocksRows {
  OrthonormalizeArgs m;
  double* room;

  TESSERA_DEVICE float& at(std::size_t row, std::size_t column) const { return m.matrix[row * m.columns + column]; }
  TESSERA_DEVICE double dot(std::size_t a, std::size_t b) const {
    double sum = 0;
    for (std::size_t row = thread_index(); row < m.rows; row += thread_count())
      sum += static_cast<double>(at(row, a)) * static_cast<double>(at(row, b));
    return over_block(sum, Add{}, room);
  }
  TESSERA_DEVICE void subtract(std::size_t column, std::size_t other, double along) const {
    for (std::size_t row = thread_index(); row < m.rows; row += thread_count())
      at(row, column) =
          static_cast<float>(static_cast<double>(at(row, column)) - along * static_cast<double>(at(row, other)));
  }
  TESSERA_DEVICE void divide(std::size_t column, double length) const {
    for (std::size_t row = thread_index(); row < m.rows; row += thread_count())
      at(row, column) = static_cast<float>(static_cast<double>(at(row, column)) / length);
  }
  TESSERA_DEVICE void clear(std::size_t column) const {
    for (std::size_t row = thread_index(); row < m.rows; row += thread_count()) at(row, column) = 0;
  }
  TESSERA_DEVICE void draw(std::size_t column, const PhiloxStream& stream) const {
    const NormalFill<float> normal{.mean = 0, .deviation = 1};
    for (std::size_t row = thread_index(); row < m.rows; row += thread_count()) {
      const std::uint64_t number = column * m.rows + row;
      at(row, column) = drawn(normal, philox_block(stream, number / 4).word[number % 4]);
    }
  }
};

struct FreshColumns {
  PhiloxStream stream[kernels::kFreshColumns];
};

/// Of a length or its square.
TESSERA_DEVICE bool finite(double length) { return length <= 1.7976931348623157e308; }  // false for NaN too

/// One block, whose threads process the columns together.
TESSERA_PLAIN_KERNEL void orthonormalize_kernel(OrthonormalizeArgs m, FreshColumns fresh) {
  const BlocksRows rows{m, shared_memory<double>()};
  for (std::size_t column = 0; column < m.columns; ++column) {
    if (column >= m.rows) {
      if (!finite(rows.dot(column, column))) return;
      rows.clear(column);
      continue;
    }
    for (std::uint64_t attempt = 0; attempt < kernels::kFreshColumns; ++attempt) {
      const double before = root(rows.dot(column, column));
      for (int pass = 0; pass < 2; ++pass)
        for (std::size_t other = 0; other < column; ++other) rows.subtract(column, other, rows.dot(column, other));
      const double length = root(rows.dot(column, column));
      if (!finite(length)) return;
      if (length > kernels::kDependent * before) {
        rows.divide(column, length);
        break;
      }
      rows.draw(column, fresh.stream[attempt]);
    }
  }
}

inline void orthonormalize(NativeStream stream, const OrthonormalizeArgs& args) {
  if (args.rows == 0 || args.columns == 0) return;
  FreshColumns fresh;
  for (std::uint64_t seed = 0; seed < kernels::kFreshColumns; ++seed)
    fresh.stream[seed] = philox_stream(tensor_stream(seed, "fresh"));
  static_assert(kernels::kOrthonormalizeParts % kWarp == 0);
  launch(stream, {.blocks = 1, .threads = kernels::kOrthonormalizeParts, .shared = kReduceRoom<double>},
         orthonormalize_kernel, args, fresh);
}

}  // namespace tessera::nn::cuda
