// sum and sum_of_squares of elementwise.h.
#include <tuple>
#include <vector>

#include "tessera/nn/kernels/elementwise.h"
#include "tessera/nn/kernels/tiles.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/nn/kernels/reduce.cpp"
#include "hwy/foreach_target.h"  // includes this file once per instruction set

#include "tessera/nn/kernels/simd-inl.h"

#ifndef TESSERA_NN_KERNELS_REDUCE_ONCE
#define TESSERA_NN_KERNELS_REDUCE_ONCE
namespace tessera::nn::kernels {
template <class T>
struct ReduceTable {
  double (*sum)(const T*, std::size_t);
  double (*sum_of_squares)(const T*, std::size_t);
};
using ReduceTables = std::tuple<ReduceTable<float>, ReduceTable<double>>;
}  // namespace tessera::nn::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::nn::kernels::HWY_NAMESPACE {
namespace {

/// Sum of f(x) over f64 copies of x. The copies of 32 elements pass through L1, which costs less than the reading of x.
template <class T, class Step>
HWY_INLINE double sum_with(const T* x, std::size_t count, Step step) {
  constexpr std::size_t kGroup = 512;
  static_assert(kGroup % kSumLanes == 0);
  Sum<double> sum;
  const auto one = [&](std::size_t p, Vec<double> v) HWY_ATTR { sum.part[p] = step(sum.part[p], v); };
  if constexpr (sizeof(T) == sizeof(double)) {
    reduce<double>(count, one, x);
  } else {
    alignas(64) double wide[kGroup];
    for (std::size_t i = 0; i < count; i += kGroup) {
      const std::size_t n = count - i < kGroup ? count - i : kGroup;
      for (std::size_t j = 0; j < n; ++j) wide[j] = static_cast<double>(x[i + j]);
      reduce<double>(n, one, static_cast<const double*>(wide));
    }
  }
  return sum.total();
}

template <class T>
double sum(const T* x, std::size_t count) {
  return sum_with<T>(x, count, [](Vec<double> s, Vec<double> v) HWY_ATTR { return hn::Add(s, v); });
}
template <class T>
double sum_of_squares(const T* x, std::size_t count) {
  return sum_with<T>(x, count, [](Vec<double> s, Vec<double> v) HWY_ATTR { return hn::MulAdd(v, v, s); });
}

const ReduceTables* reduce_tables() {
  static constexpr ReduceTables tables{ReduceTable<float>{&sum<float>, &sum_of_squares<float>},
                                       ReduceTable<double>{&sum<double>, &sum_of_squares<double>}};
  return &tables;
}

}  // namespace
}  // namespace tessera::nn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::nn::kernels {
HWY_EXPORT(reduce_tables);
namespace {

template <class T>
double reduce_tiles(ThreadPool& pool, const T* x, std::size_t count, double (*kernel)(const T*, std::size_t)) {
  std::vector<double> part(tiles_of(count, kElementTile));
  for_tiles(pool, count, kElementTile, [&](std::size_t begin, std::size_t end) {
    part[begin / kElementTile] = kernel(x + begin, end - begin);
  });
  double total = 0;
  for (const double value : part) total += value;
  return total;
}

template <class T>
const ReduceTable<T>& kernels() {
  return std::get<ReduceTable<T>>(*HWY_DYNAMIC_DISPATCH(reduce_tables)());
}
}  // namespace

template <class T>
double sum(ThreadPool& pool, const T* x, std::size_t count) {
  return reduce_tiles<T>(pool, x, count, kernels<T>().sum);
}
template <class T>
double sum_of_squares(ThreadPool& pool, const T* x, std::size_t count) {
  return reduce_tiles<T>(pool, x, count, kernels<T>().sum_of_squares);
}

template double sum<float>(ThreadPool&, const float*, std::size_t);
template double sum<double>(ThreadPool&, const double*, std::size_t);
template double sum_of_squares<float>(ThreadPool&, const float*, std::size_t);
template double sum_of_squares<double>(ThreadPool&, const double*, std::size_t);

}  // namespace tessera::nn::kernels
#endif  // HWY_ONCE
