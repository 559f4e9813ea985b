// What the host's kernels share: choices by element type, and the division of ranges into tiles, which depends only on
// the problem.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <tuple>

#include "tessera/base/dtype.h"
#include "tessera/base/error.h"
#include "tessera/nn/thread_pool.h"

namespace tessera::nn::kernels {

/// The functions of one instruction set, for each element type.
template <template <class> class Table>
using Tables = std::tuple<Table<float>, Table<double>>;

// In the namespace of an instruction set: the function NAME that returns its tables, of the constants kTable<T>.
#define TESSERA_KERNEL_TABLES(TABLE, NAME)                                \
  const Tables<TABLE>* NAME() {                                           \
    static constexpr Tables<TABLE> tables{kTable<float>, kTable<double>}; \
    return &tables;                                                       \
  }

// Once, outside of it: kernels<T>(), the table of the best instruction set of this processor.
#define TESSERA_CHOSEN_KERNELS(TABLE, NAME)                   \
  HWY_EXPORT(NAME);                                           \
  template <class T>                                          \
  static const TABLE<T>& kernels() {                          \
    return std::get<TABLE<T>>(*HWY_DYNAMIC_DISPATCH(NAME)()); \
  }

/// Calls function(T{}) with the C++ type of `dtype`: f32, f16 or bf16. Throws Unsupported for others, which ends with
/// `advice`.
template <class Function>
void for_compute_dtype(const char* kernel, base::DType dtype, const char* advice, Function&& function) {
  if (dtype == base::DType::f32) return function(float{});
  if (dtype == base::DType::f16) return function(base::f16{});
  if (dtype == base::DType::bf16) return function(base::bf16{});
  throw base::Unsupported(std::string(kernel) + ": no kernel for " + std::string(base::name_of(dtype)) + advice);
}

/// Elements per tile of an element-wise kernel: large enough to hide the scheduling cost, small enough for L2.
inline constexpr std::size_t kElementTile = 16384;

constexpr std::size_t tiles_of(std::size_t count, std::size_t tile) { return (count + tile - 1) / tile; }

/// Calls function(begin, end) over [0, count) in tiles of `tile`.
template <class Function>
void for_tiles(ThreadPool& pool, std::size_t count, std::size_t tile, Function&& function) {
  pool.parallel_for(tiles_of(count, tile), [&](std::size_t index) {
    const std::size_t begin = index * tile;
    function(begin, std::min(count, begin + tile));
  });
}

/// Rows per tile such that a kernel over [rows, width] has at most 16 tiles of at least 16 rows.
constexpr std::size_t row_tile(std::size_t rows) { return std::max<std::size_t>(16, tiles_of(rows, 16)); }

}  // namespace tessera::nn::kernels
