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

/// Arguments of multiply().
template <class T>
struct MultiplyArgs {
  const T* a = nullptr;     ///< [count]
  const T* b = nullptr;     ///< [count]
  T* out = nullptr;         ///< [count]; may be a or b
  std::size_t count = 0;    ///< elements
  bool accumulate = false;  ///< true: out += a * b
};
/// out = a * b, or out += a * b (rounded twice) if `accumulate`
template <class T>
TESSERA_API void multiply(ThreadPool& pool, const MultiplyArgs<T>& args);

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

/// Sum of x in f64, in an order that depends only on `count`.
template <class T>
TESSERA_API double sum(ThreadPool& pool, const T* x, std::size_t count);
using base::Norm;
/// Partial result of a norm: the sum of |x|^p in f64, in an order that depends only on `count`; or the largest |x|, NaN
/// if x contains one. Partial results combine by addition, or by their maximum.
template <class T>
TESSERA_API double norm_part(ThreadPool& pool, Norm norm, const T* x, std::size_t count);

/// Element conversions as in base/dtype.h (to half precision: nearest even). Ranges must not overlap.
TESSERA_API void convert(ThreadPool& pool, const float* in, base::f16* out, std::size_t count);
/// Converts f32 to bf16.
TESSERA_API void convert(ThreadPool& pool, const float* in, base::bf16* out, std::size_t count);
/// Converts f16 to f32; exact.
TESSERA_API void convert(ThreadPool& pool, const base::f16* in, float* out, std::size_t count);
/// Converts bf16 to f32; exact.
TESSERA_API void convert(ThreadPool& pool, const base::bf16* in, float* out, std::size_t count);
/// Converts f16 to bf16.
TESSERA_API void convert(ThreadPool& pool, const base::f16* in, base::bf16* out, std::size_t count);
/// Converts bf16 to f16.
TESSERA_API void convert(ThreadPool& pool, const base::bf16* in, base::f16* out, std::size_t count);

}  // namespace tessera::nn::kernels
