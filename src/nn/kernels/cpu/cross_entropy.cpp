#include "tessera/nn/kernels/cross_entropy.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/portable_math.h"
#include "tessera/nn/kernels/cpu/tiles.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/nn/kernels/cpu/cross_entropy.cpp"
#include "hwy/foreach_target.h"  // includes this file once per instruction set

#include "tessera/nn/kernels/cpu/math-inl.h"

#ifndef TESSERA_NN_KERNELS_CROSS_ENTROPY_ONCE
#define TESSERA_NN_KERNELS_CROSS_ENTROPY_ONCE
namespace tessera::nn::kernels {
template <class T>
struct CrossEntropyTable {
  void (*row_statistics)(const T* logits, std::size_t count, T* max, T* sum);
  void (*backward)(const CrossEntropyBackward<T>&, std::size_t begin, std::size_t end);
};
}  // namespace tessera::nn::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::nn::kernels::HWY_NAMESPACE {
namespace {

template <class T>
T row_max(const T* x, std::size_t count) {
  // A maximum doesn't depend on the order. It may lose a NaN, which the sum then yields.
  Vec<T> best = hn::Set(Tag<T>(), -std::numeric_limits<T>::infinity());
  std::size_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) best = max_of<T>(best, load<T>(x + i));
  T max = hn::GetLane(hn::MaxOfLanes(Tag<T>(), best));
  for (; i < count; ++i) max = x[i] > max ? x[i] : max;
  return max;
}

template <class T>
void row_statistics(const T* x, std::size_t count, T* max, T* total) {
  *max = row_max(x, count);
  const Vec<T> shift = hn::Set(Tag<T>(), *max);
  Sum<T> sum;
  const auto step = [&](std::size_t p, Vec<T> v)
                        HWY_ATTR { sum.part[p] = hn::Add(sum.part[p], exp<T>(hn::Sub(v, shift))); };
  const std::size_t whole = count / kLanes<T> * kLanes<T>;
  reduce<T>(whole, step, x);
  if (whole < count) {
    alignas(64) T rest[kLanes<T>];
    for (std::size_t i = 0; i < kLanes<T>; ++i)
      rest[i] = whole + i < count ? x[whole + i] : -std::numeric_limits<T>::infinity();
    step(whole % kSumLanes / kLanes<T>, hn::Load(Tag<T>(), rest));
  }
  *total = sum.total();
}

template <class T>
void backward(const CrossEntropyBackward<T>& a, std::size_t begin, std::size_t end) {
  const std::size_t stride = row_stride(a);
  for (std::size_t row = begin; row < end; ++row) {
    const T* x = a.logits + row * stride;
    T* dx = a.dlogits + row * stride;
    if (!a.accumulate) std::memset(dx + a.vocabulary, 0, (stride - a.vocabulary) * sizeof(T));
    if (a.targets[row] == a.ignore_index) {
      if (!a.accumulate) std::memset(dx, 0, a.vocabulary * sizeof(T));
      continue;
    }
    const std::size_t target = static_cast<std::size_t>(a.targets[row]);
    const Vec<T> shift = hn::Set(Tag<T>(), a.row_max[row]);
    const Vec<T> factor = hn::Set(Tag<T>(), a.scale / a.row_sum[row]);
    map_into<T>(
        a.accumulate, dx, a.vocabulary, [&](Vec<T> v) HWY_ATTR { return hn::Mul(factor, exp<T>(hn::Sub(v, shift))); },
        x);
    dx[target] -= a.scale;
  }
}

template <class T>
constexpr CrossEntropyTable<T> kTable{&row_statistics<T>, &backward<T>};
TESSERA_KERNEL_TABLES(CrossEntropyTable, cross_entropy_tables)

}  // namespace
}  // namespace tessera::nn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::nn::kernels {
TESSERA_CHOSEN_KERNELS(CrossEntropyTable, cross_entropy_tables)
namespace {

std::size_t tile_rows(std::size_t vocabulary) {
  return std::max<std::size_t>(1, kElementTile / std::max<std::size_t>(1, vocabulary));
}
}  // namespace

template <class T>
CrossEntropyResult cross_entropy_forward(ThreadPool& pool, const CrossEntropyForward<T>& args) {
  CrossEntropyResult result;
  for (std::size_t row = 0; row < args.rows; ++row) {
    const std::int32_t target = args.targets[row];
    if (target == args.ignore_index) continue;
    if (target < 0 || static_cast<std::size_t>(target) >= args.vocabulary)
      throw base::InvalidUsage("cross entropy: target " + std::to_string(target) + " of row " + std::to_string(row) +
                               " is outside the vocabulary of " + std::to_string(args.vocabulary));
    ++result.valid;
  }
  std::vector<double> loss(args.rows);
  for_tiles(pool, args.rows, tile_rows(args.vocabulary), [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; ++row) {
      if (args.targets[row] == args.ignore_index) continue;
      const T* x = args.logits + row * row_stride(args);
      T max, sum;
      kernels<T>().row_statistics(x, args.vocabulary, &max, &sum);
      loss[row] = base::portable::log(static_cast<double>(sum)) -
                  (static_cast<double>(x[args.targets[row]]) - static_cast<double>(max));
      if (args.row_max) args.row_max[row] = max;
      if (args.row_sum) args.row_sum[row] = sum;
    }
  });
  for (const double value : loss) result.loss_sum += value;
  return result;
}

template <class T>
void cross_entropy_backward(ThreadPool& pool, const CrossEntropyBackward<T>& args) {
  for_tiles(pool, args.rows, tile_rows(args.vocabulary),
            [&](std::size_t begin, std::size_t end) { kernels<T>().backward(args, begin, end); });
}

template CrossEntropyResult cross_entropy_forward<float>(ThreadPool&, const CrossEntropyForward<float>&);
template CrossEntropyResult cross_entropy_forward<double>(ThreadPool&, const CrossEntropyForward<double>&);
template void cross_entropy_backward<float>(ThreadPool&, const CrossEntropyBackward<float>&);
template void cross_entropy_backward<double>(ThreadPool&, const CrossEntropyBackward<double>&);

}  // namespace tessera::nn::kernels
#endif  // HWY_ONCE
