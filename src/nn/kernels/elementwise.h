// Element-wise kernels over contiguous ranges, sums over a range, and conversions. The result of an element depends
// only on its inputs, never on its position, the alignment or the number of threads.
#pragma once

#include <cstddef>

#include "tessera/base/dtype.h"
#include "tessera/base/optimizer.h"
#include "tessera/nn/kernels/opmath.h"
#include "tessera/nn/thread_pool.h"

namespace tessera::nn::kernels {

// T is float or double in all functions. `out` may be one of the inputs (in place) and must not overlap them otherwise.

/// out = value
template <class T>
TESSERA_API void fill(ThreadPool& pool, T value, T* out, std::size_t count);
/// out = x, or out += x if `accumulate`: passes a gradient on.
template <class T>
TESSERA_API void assign(ThreadPool& pool, const T* x, T* out, std::size_t count, bool accumulate);
/// out = a + b
template <class T>
TESSERA_API void add(ThreadPool& pool, const T* a, const T* b, T* out, std::size_t count);

/// Arguments of assign and add, for kernel tables.
template <class T>
struct AssignArgs {
  const T* x = nullptr;     ///< [count]
  T* out = nullptr;         ///< [count]
  std::size_t count = 0;    ///< elements
  bool accumulate = false;  ///< true: out += x
};
/// Arguments of add, for kernel tables.
template <class T>
struct AddArgs {
  const T* a = nullptr;   ///< [count]
  const T* b = nullptr;   ///< [count]
  T* out = nullptr;       ///< [count]; may be a or b
  std::size_t count = 0;  ///< elements
};

/// Arguments of scale().
template <class T>
struct ScaleArgs {
  const T* x = nullptr;     ///< [count]
  OpMath<T> factor = 1;     ///< factor in the opmath type
  T* out = nullptr;         ///< [count]; may be x
  std::size_t count = 0;    ///< elements
  bool accumulate = false;  ///< true: out += factor * x
};
/// out = factor * x, or out += factor * x (rounded twice: multiply, then add) if `accumulate`
template <class T>
TESSERA_API void scale(ThreadPool& pool, const ScaleArgs<T>& args);

/// y[rows, columns] += bias[columns] in every row
template <class T>
TESSERA_API void add_bias(ThreadPool& pool, const T* bias, T* y, std::size_t rows, std::size_t columns);
/// y[rows, columns] = bias[columns] in every row
template <class T>
TESSERA_API void broadcast_rows(ThreadPool& pool, const T* bias, T* y, std::size_t rows, std::size_t columns);

/// Arguments of column_sums().
template <class T>
struct ColumnSumsArgs {
  const T* x = nullptr;     ///< [rows, columns]
  T* out = nullptr;         ///< [columns]
  std::size_t rows = 0,     ///< rows of x
      columns = 0;          ///< columns of x
  bool accumulate = false;  ///< true: out += ...
};
/// out[c] = sum over rows of x[r, c], in a fixed order (blocks of 64 rows, each in order): the bias gradient.
template <class T>
TESSERA_API void column_sums(ThreadPool& pool, const ColumnSumsArgs<T>& args);

using base::Norm;
/// Partial result of a norm: the sum of |x|^p in f64, in an order that depends only on `count`; or the largest |x|, NaN
/// if x contains one. Partial results combine by addition, or by their maximum.
template <class T>
TESSERA_API double norm_part(ThreadPool& pool, Norm norm, const T* x, std::size_t count);

/// Converts `count` elements between any two of f32, f16 and bf16, as in base/dtype.h. Ranges must not overlap.
struct ConvertArgs {
  const void* in = nullptr;             ///< [count]
  base::DType from = base::DType::f32;  ///< type of `in`
  void* out = nullptr;                  ///< [count]
  base::DType to = base::DType::f32;    ///< type of `out`
  std::size_t count = 0;                ///< elements
};
/// Converts as ConvertArgs says. Throws Unsupported for other types.
TESSERA_API void convert(ThreadPool& pool, const ConvertArgs& args);

}  // namespace tessera::nn::kernels
