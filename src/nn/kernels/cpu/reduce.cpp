// norm_part of elementwise.h.
#include <array>
#include <cmath>
#include <numeric>
#include <vector>

#include "tessera/nn/kernels/cpu/tiles.h"
#include "tessera/nn/kernels/elementwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/nn/kernels/cpu/reduce.cpp"
#include "hwy/foreach_target.h"  // includes this file once per instruction set

#include "tessera/nn/kernels/cpu/simd-inl.h"

#ifndef TESSERA_NN_KERNELS_REDUCE_ONCE
#define TESSERA_NN_KERNELS_REDUCE_ONCE
namespace tessera::nn::kernels {
template <class T>
struct ReduceTable {
  std::array<double (*)(const T*, std::size_t), 4> norms;  // indexed by Norm
};
}  // namespace tessera::nn::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::nn::kernels::HWY_NAMESPACE {
namespace {

/// Calls step(...) for f64 copies of x, in as many lanes as a sum has. The copies of 32 elements go through L1, which
/// costs less than reading x.
template <class T, class Step>
HWY_INLINE Sum<double> over_lanes(const T* x, std::size_t count, Step step) {
  constexpr std::size_t kGroup = 512;
  static_assert(kGroup % kSumLanes == 0);
  Sum<double> sum;
  const auto one = [&](std::size_t p, Vec<double> v) HWY_ATTR { sum.part[p] = step(sum.part[p], v); };
  if constexpr (sizeof(T) == sizeof(double)) {
    reduce<double>(count, one, x);
  } else {
    alignas(64) double doubles[kGroup];
    for (std::size_t i = 0; i < count; i += kGroup) {
      const std::size_t n = count - i < kGroup ? count - i : kGroup;
      for (std::size_t j = 0; j < n; ++j) doubles[j] = static_cast<double>(x[i + j]);
      reduce<double>(n, one, static_cast<const double*>(doubles));
    }
  }
  return sum;
}

template <class T>
double sum_of_magnitudes(const T* x, std::size_t count) {
  return over_lanes<T>(x, count, [](Vec<double> s, Vec<double> v) HWY_ATTR { return hn::Add(s, hn::Abs(v)); }).total();
}
template <class T>
double sum_of_squares(const T* x, std::size_t count) {
  return over_lanes<T>(x, count, [](Vec<double> s, Vec<double> v) HWY_ATTR { return mul_add<double>(v, v, s); })
      .total();
}
template <class T>
double sum_of_cubes(const T* x, std::size_t count) {
  return over_lanes<T>(x, count,
                       [](Vec<double> s, Vec<double> v)
                           HWY_ATTR { return mul_add<double>(hn::Mul(v, v), hn::Abs(v), s); })
      .total();
}
template <class T>
double largest_magnitude(const T* x, std::size_t count) {
  const auto larger = [](Vec<double> s, Vec<double> v) HWY_ATTR {
    const auto magnitude = hn::Abs(v);
    return hn::IfThenElse(hn::Or(hn::Gt(magnitude, s), hn::IsNaN(v)), magnitude, s);
  };
  return over_lanes<T>(x, count, larger).largest();
}

template <class T>
constexpr ReduceTable<T> kTable{{&sum_of_magnitudes<T>, &sum_of_squares<T>, &sum_of_cubes<T>, &largest_magnitude<T>}};
TESSERA_KERNEL_TABLES(ReduceTable, reduce_tables)

}  // namespace
}  // namespace tessera::nn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::nn::kernels {
TESSERA_CHOSEN_KERNELS(ReduceTable, reduce_tables)
namespace {

template <class T>
std::vector<double> tile_parts(ThreadPool& pool, const T* x, std::size_t count,
                               double (*kernel)(const T*, std::size_t)) {
  std::vector<double> part(tiles_of(count, kElementTile));
  for_tiles(pool, count, kElementTile,
            [&](std::size_t begin, std::size_t end) { part[begin / kElementTile] = kernel(x + begin, end - begin); });
  return part;
}

double largest_of(const std::vector<double>& parts) {
  double largest = 0;
  for (const double value : parts) largest = std::isnan(value) || value > largest ? value : largest;
  return largest;
}

}  // namespace

template <class T>
double norm_part(ThreadPool& pool, Norm norm, const T* x, std::size_t count) {
  const auto parts = tile_parts<T>(pool, x, count, kernels<T>().norms[static_cast<std::size_t>(norm)]);
  return norm == Norm::infinity ? largest_of(parts) : std::accumulate(parts.begin(), parts.end(), 0.0);
}

template double norm_part<float>(ThreadPool&, Norm, const float*, std::size_t);
template double norm_part<double>(ThreadPool&, Norm, const double*, std::size_t);

}  // namespace tessera::nn::kernels
#endif  // HWY_ONCE
