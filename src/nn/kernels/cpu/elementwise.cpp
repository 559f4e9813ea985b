#include "tessera/nn/kernels/elementwise.h"

#include <cstring>

#include "tessera/nn/kernels/cpu/tiles.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/nn/kernels/cpu/elementwise.cpp"
#include "hwy/foreach_target.h"  // includes this file once per instruction set

#include "tessera/nn/kernels/cpu/simd-inl.h"

#ifndef TESSERA_NN_KERNELS_ELEMENTWISE_ONCE
#define TESSERA_NN_KERNELS_ELEMENTWISE_ONCE
namespace tessera::nn::kernels {
template <class T>
struct ElementwiseTable {
  void (*add)(const T* a, const T* b, T* out, std::size_t count);
  void (*scale)(const ScaleArgs<T>&);
  void (*column_sums)(const ColumnSumsArgs<T>&, std::size_t begin, std::size_t end);
};
inline constexpr std::size_t kColumnTile = 384;
}  // namespace tessera::nn::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::nn::kernels::HWY_NAMESPACE {
namespace {

template <class T>
void add(const T* a, const T* b, T* out, std::size_t count) {
  map<T>(
      out, count, [](Vec<T> x, Vec<T> y) HWY_ATTR { return hn::Add(x, y); }, a, b);
}

template <class T>
void scale(const ScaleArgs<T>& a) {
  const Vec<T> factor = hn::Set(Tag<T>(), a.factor);
  map_into<T>(
      a.accumulate, a.out, a.count, [factor](Vec<T> x) HWY_ATTR { return hn::Mul(factor, x); }, a.x);
}

// Columns [begin, end), at most kColumnTile: sums 64 rows at a time, then adds these sums, which rounds less than one
// long chain.
template <class T>
void column_sums(const ColumnSumsArgs<T>& a, std::size_t begin, std::size_t end) {
  constexpr std::size_t kRows = 64;
  const std::size_t count = end - begin;
  T total[kColumnTile] = {};
  for (std::size_t first = 0; first < a.rows; first += kRows) {
    const std::size_t last = std::min(a.rows, first + kRows);
    T block[kColumnTile] = {};
    for (std::size_t row = first; row < last; ++row) add<T>(block, a.x + row * a.columns + begin, block, count);
    add<T>(total, block, total, count);
  }
  if (a.accumulate)
    add<T>(a.out + begin, total, a.out + begin, count);
  else
    std::memcpy(a.out + begin, total, count * sizeof(T));
}

template <class T>
constexpr ElementwiseTable<T> kTable{&add<T>, &scale<T>, &column_sums<T>};
TESSERA_KERNEL_TABLES(ElementwiseTable, elementwise_tables)

}  // namespace
}  // namespace tessera::nn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::nn::kernels {
TESSERA_CHOSEN_KERNELS(ElementwiseTable, elementwise_tables)
namespace {

template <class T, class RowFunction>
void for_rows(ThreadPool& pool, std::size_t rows, std::size_t columns, RowFunction&& function) {
  const std::size_t tile = std::max<std::size_t>(1, kElementTile / std::max<std::size_t>(1, columns));
  for_tiles(pool, rows, tile, [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; ++row) function(row);
  });
}
}  // namespace

template <class T>
void fill(ThreadPool& pool, T value, T* out, std::size_t count) {
  for_tiles(pool, count, kElementTile,
            [&](std::size_t begin, std::size_t end) { std::fill(out + begin, out + end, value); });
}

template <class T>
void assign(ThreadPool& pool, const T* x, T* out, std::size_t count, bool accumulate) {
  if (accumulate) return add<T>(pool, out, x, out, count);
  if (x == out) return;
  for_tiles(pool, count, kElementTile, [&](std::size_t begin, std::size_t end) {
    std::memcpy(out + begin, x + begin, (end - begin) * sizeof(T));
  });
}

template <class T>
void add(ThreadPool& pool, const T* a, const T* b, T* out, std::size_t count) {
  for_tiles(pool, count, kElementTile, [&](std::size_t begin, std::size_t end) {
    kernels<T>().add(a + begin, b + begin, out + begin, end - begin);
  });
}

template <class T>
void scale(ThreadPool& pool, const ScaleArgs<T>& args) {
  for_tiles(pool, args.count, kElementTile, [&](std::size_t begin, std::size_t end) {
    kernels<T>().scale({args.x + begin, args.factor, args.out + begin, end - begin, args.accumulate});
  });
}

template <class T>
void add_bias(ThreadPool& pool, const T* bias, T* y, std::size_t rows, std::size_t columns) {
  for_rows<T>(pool, rows, columns,
              [&](std::size_t row) { kernels<T>().add(y + row * columns, bias, y + row * columns, columns); });
}

template <class T>
void broadcast_rows(ThreadPool& pool, const T* bias, T* y, std::size_t rows, std::size_t columns) {
  for_rows<T>(pool, rows, columns, [&](std::size_t row) { std::memcpy(y + row * columns, bias, columns * sizeof(T)); });
}

template <class T>
void column_sums(ThreadPool& pool, const ColumnSumsArgs<T>& args) {
  for_tiles(pool, args.columns, kColumnTile,
            [&](std::size_t begin, std::size_t end) { kernels<T>().column_sums(args, begin, end); });
}

template void fill<float>(ThreadPool&, float, float*, std::size_t);
template void fill<double>(ThreadPool&, double, double*, std::size_t);
template void assign<float>(ThreadPool&, const float*, float*, std::size_t, bool);
template void assign<double>(ThreadPool&, const double*, double*, std::size_t, bool);
template void add<float>(ThreadPool&, const float*, const float*, float*, std::size_t);
template void add<double>(ThreadPool&, const double*, const double*, double*, std::size_t);
template void scale<float>(ThreadPool&, const ScaleArgs<float>&);
template void scale<double>(ThreadPool&, const ScaleArgs<double>&);
template void add_bias<float>(ThreadPool&, const float*, float*, std::size_t, std::size_t);
template void add_bias<double>(ThreadPool&, const double*, double*, std::size_t, std::size_t);
template void broadcast_rows<float>(ThreadPool&, const float*, float*, std::size_t, std::size_t);
template void broadcast_rows<double>(ThreadPool&, const double*, double*, std::size_t, std::size_t);
template void column_sums<float>(ThreadPool&, const ColumnSumsArgs<float>&);
template void column_sums<double>(ThreadPool&, const ColumnSumsArgs<double>&);

}  // namespace tessera::nn::kernels
#endif  // HWY_ONCE
