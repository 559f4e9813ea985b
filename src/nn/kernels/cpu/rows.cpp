// Norms and cross-entropy: what combines the elements of a row.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/portable_math.h"
#include "tessera/nn/kernels/cpu/tiles.h"
#include "tessera/nn/kernels/cross_entropy.h"
#include "tessera/nn/kernels/norm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/nn/kernels/cpu/rows.cpp"
#include "hwy/foreach_target.h"  // includes this file once per instruction set

#include "tessera/nn/kernels/cpu/math-inl.h"

#ifndef TESSERA_NN_KERNELS_ROWS_ONCE
#define TESSERA_NN_KERNELS_ROWS_ONCE
namespace tessera::nn::kernels {
/// Functions on rows [begin, end). The backwards of norms add to this tile's dweight and dbias, which are initially
/// zero (null: not required).
template <class T>
struct RowTable {
  void (*normalize[2])(const NormForward<T>&, std::size_t begin, std::size_t end);  // by RowNorm
  void (*norm_gradients[2])(const NormBackward<T>&, std::size_t begin, std::size_t end);
  void (*row_statistics)(const T* logits, std::size_t count, T* max, T* sum);
  void (*loss_gradients)(const CrossEntropyBackward<T>&, std::size_t begin, std::size_t end);
};
}  // namespace tessera::nn::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::nn::kernels::HWY_NAMESPACE {
namespace {

/// Like reduce(), but the vector of the last elements is padded with `filler`.
template <class T, class Step>
HWY_INLINE void reduce_padded(std::size_t count, T filler, Step step, const T* x) {
  const std::size_t whole = count / kLanes<T> * kLanes<T>;
  reduce<T>(whole, step, x);
  if (whole == count) return;
  alignas(64) T rest[kLanes<T>];
  for (std::size_t i = 0; i < kLanes<T>; ++i) rest[i] = whole + i < count ? x[whole + i] : filler;
  step(whole % kSumLanes / kLanes<T>, hn::Load(Tag<T>(), rest));
}

template <class T, RowNorm norm>
HWY_INLINE Vec<T> centered(Vec<T> x, Vec<T> mean) {
  if constexpr (norm == RowNorm::rms)
    return x;
  else
    return hn::Sub(x, mean);
}

template <class T, RowNorm norm>
void normalize(const NormForward<T>& a, std::size_t begin, std::size_t end) {
  const T width = static_cast<T>(a.width);
  for (std::size_t row = begin; row < end; ++row) {
    const T* x = a.x + row * a.width;
    T* y = a.y + row * a.width;
    T mean = 0;
    if constexpr (norm == RowNorm::layer) {
      Sum<T> sum;
      reduce<T>(
          a.width, [&](std::size_t p, Vec<T> v) HWY_ATTR { sum.part[p] = hn::Add(sum.part[p], v); }, x);
      mean = sum.total() / width;
    }
    // A second pass over the row, which is in L1, sums around the mean to avoid cancellation. Padding with
    // zeros would add mean^2.
    const Vec<T> center = hn::Set(Tag<T>(), mean);
    Sum<T> squares;
    const auto square = [&](std::size_t p, Vec<T> v) HWY_ATTR {
      const Vec<T> d = centered<T, norm>(v, center);
      squares.part[p] = mul_add<T>(d, d, squares.part[p]);
    };
    reduce_padded<T>(a.width, mean, square, x);
    const T rstd = T(1) / std::sqrt(squares.total() / width + a.eps);
    const Vec<T> factor = hn::Set(Tag<T>(), rstd);
    const auto normalized = [&](Vec<T> v) HWY_ATTR { return hn::Mul(centered<T, norm>(v, center), factor); };
    if (a.bias)
      map<T>(
          y, a.width, [&](Vec<T> v, Vec<T> w, Vec<T> b) HWY_ATTR { return mul_add<T>(normalized(v), w, b); }, x,
          a.weight, a.bias);
    else
      map<T>(
          y, a.width, [&](Vec<T> v, Vec<T> w) HWY_ATTR { return hn::Mul(normalized(v), w); }, x, a.weight);
    if (a.mean) a.mean[row] = mean;
    if (a.rstd) a.rstd[row] = rstd;
  }
}

/// dweight += dy * xhat and dbias += dy for one row.
template <class T, class Normalized>
HWY_INLINE void add_weight_gradients(std::size_t width, const T* x, const T* dy, Normalized normalized, T* dweight,
                                     T* dbias) {
  if (dweight)
    map<T>(
        dweight, width, [&](Vec<T> w, Vec<T> v, Vec<T> g) HWY_ATTR { return mul_add<T>(g, normalized(v), w); },
        static_cast<const T*>(dweight), x, dy);
  if (dbias)
    map<T>(
        dbias, width, [](Vec<T> b, Vec<T> g) HWY_ATTR { return hn::Add(b, g); }, static_cast<const T*>(dbias), dy);
}

// With g = dy * weight and xhat the normalized row: dx = rstd (g - mean(g) - xhat mean(g xhat)); RMS norm has no
// mean(g).
template <class T, RowNorm norm>
void norm_gradients(const NormBackward<T>& a, std::size_t begin, std::size_t end) {
  const T width = static_cast<T>(a.width);
  for (std::size_t row = begin; row < end; ++row) {
    const T* x = a.x + row * a.width;
    const T* dy = a.dy + row * a.width;
    const Vec<T> center = hn::Set(Tag<T>(), norm == RowNorm::layer ? a.mean[row] : T(0));
    const Vec<T> factor = hn::Set(Tag<T>(), a.rstd[row]);
    const auto normalized = [&](Vec<T> v) HWY_ATTR { return hn::Mul(centered<T, norm>(v, center), factor); };
    add_weight_gradients<T>(a.width, x, dy, normalized, a.dweight, a.dbias);
    if (!a.dx) continue;
    Sum<T> sum, product;
    reduce<T>(
        a.width,
        [&](std::size_t p, Vec<T> v, Vec<T> w, Vec<T> d) HWY_ATTR {
          const Vec<T> g = hn::Mul(d, w);
          if constexpr (norm == RowNorm::layer) sum.part[p] = hn::Add(sum.part[p], g);
          product.part[p] = mul_add<T>(g, normalized(v), product.part[p]);
        },
        x, a.weight, dy);
    const Vec<T> mean_g = hn::Set(Tag<T>(), sum.total() / width);
    const Vec<T> mean_gx = hn::Set(Tag<T>(), product.total() / width);
    map_into<T>(
        a.accumulate_dx, a.dx + row * a.width, a.width,
        [&](Vec<T> v, Vec<T> w, Vec<T> d) HWY_ATTR {
          const Vec<T> rest = neg_mul_add<T>(normalized(v), mean_gx, centered<T, norm>(hn::Mul(d, w), mean_g));
          return hn::Mul(factor, rest);
        },
        x, a.weight, dy);
  }
}

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
  reduce_padded<T>(count, -std::numeric_limits<T>::infinity(), step, x);
  *total = sum.total();
}

template <class T>
void loss_gradients(const CrossEntropyBackward<T>& a, std::size_t begin, std::size_t end) {
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
constexpr RowTable<T> kTable{{&normalize<T, RowNorm::layer>, &normalize<T, RowNorm::rms>},
                             {&norm_gradients<T, RowNorm::layer>, &norm_gradients<T, RowNorm::rms>},
                             &row_statistics<T>,
                             &loss_gradients<T>};
TESSERA_KERNEL_TABLES(RowTable, row_tables)

}  // namespace
}  // namespace tessera::nn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::nn::kernels {
TESSERA_CHOSEN_KERNELS(RowTable, row_tables)
namespace {

/// Adds the tiles' partial sums to out, in the order of the tiles.
template <class T>
void combine(const std::vector<T>& partial, std::size_t width, bool accumulate, T* out) {
  if (!out) return;
  const std::size_t tiles = partial.size() / width;
  for (std::size_t i = 0; i < width; ++i) {
    T total = tiles ? partial[i] : T(0);
    for (std::size_t tile = 1; tile < tiles; ++tile) total += partial[tile * width + i];
    out[i] = accumulate ? out[i] + total : total;
  }
}

std::size_t tile_rows(std::size_t vocabulary) {
  return std::max<std::size_t>(1, kElementTile / std::max<std::size_t>(1, vocabulary));
}
}  // namespace

template <class T>
void norm_forward(ThreadPool& pool, const NormForward<T>& args) {
  const auto normalize = kernels<T>().normalize[static_cast<std::size_t>(args.norm)];
  for_tiles(pool, args.rows, row_tile(args.rows),
            [&](std::size_t begin, std::size_t end) { normalize(args, begin, end); });
}

template <class T>
void norm_backward(ThreadPool& pool, const NormBackward<T>& args) {
  const std::size_t tile = row_tile(args.rows), tiles = tiles_of(args.rows, tile);
  std::vector<T> dweight(args.dweight ? tiles * args.width : 0), dbias(args.dbias ? tiles * args.width : 0);
  const auto gradients = kernels<T>().norm_gradients[static_cast<std::size_t>(args.norm)];
  for_tiles(pool, args.rows, tile, [&](std::size_t begin, std::size_t end) {
    NormBackward<T> part = args;
    part.dweight = args.dweight ? dweight.data() + begin / tile * args.width : nullptr;
    part.dbias = args.dbias ? dbias.data() + begin / tile * args.width : nullptr;
    gradients(part, begin, end);
  });
  combine(dweight, args.width, args.accumulate_dweight, args.dweight);
  combine(dbias, args.width, args.accumulate_dbias, args.dbias);
}

template void norm_forward<float>(ThreadPool&, const NormForward<float>&);
template void norm_forward<double>(ThreadPool&, const NormForward<double>&);
template void norm_backward<float>(ThreadPool&, const NormBackward<float>&);
template void norm_backward<double>(ThreadPool&, const NormBackward<double>&);

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
            [&](std::size_t begin, std::size_t end) { kernels<T>().loss_gradients(args, begin, end); });
}

template CrossEntropyResult cross_entropy_forward<float>(ThreadPool&, const CrossEntropyForward<float>&);
template CrossEntropyResult cross_entropy_forward<double>(ThreadPool&, const CrossEntropyForward<double>&);
template void cross_entropy_backward<float>(ThreadPool&, const CrossEntropyBackward<float>&);
template void cross_entropy_backward<double>(ThreadPool&, const CrossEntropyBackward<double>&);

}  // namespace tessera::nn::kernels
#endif  // HWY_ONCE
