#include "tessera/nn/kernels/norm.h"

#include <cmath>
#include <vector>

#include "tessera/nn/kernels/cpu/tiles.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/nn/kernels/cpu/norm.cpp"
#include "hwy/foreach_target.h"  // includes this file once per instruction set

#include "tessera/nn/kernels/cpu/simd-inl.h"

#ifndef TESSERA_NN_KERNELS_NORM_ONCE
#define TESSERA_NN_KERNELS_NORM_ONCE
namespace tessera::nn::kernels {
/// Functions on rows [begin, end). The backwards add to this tile's dweight and dbias, which are initially zero (null:
/// not required).
template <class T>
struct NormTable {
  void (*forward[2])(const NormForward<T>&, std::size_t begin, std::size_t end);  // by RowNorm
  void (*backward[2])(const NormBackward<T>&, std::size_t begin, std::size_t end);
};
}  // namespace tessera::nn::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::nn::kernels::HWY_NAMESPACE {
namespace {

template <class T, RowNorm norm>
HWY_INLINE Vec<T> centered(Vec<T> x, Vec<T> mean) {
  if constexpr (norm == RowNorm::rms)
    return x;
  else
    return hn::Sub(x, mean);
}

template <class T, RowNorm norm>
void forward(const NormForward<T>& a, std::size_t begin, std::size_t end) {
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
    // A second pass over the row, which is in L1, sums around the mean to avoid cancellation. Padding lanes would add
    // mean^2, so a separate pass processes the last part.
    const Vec<T> center = hn::Set(Tag<T>(), mean);
    Sum<T> squares;
    const auto square = [&](std::size_t p, Vec<T> v) HWY_ATTR {
      const Vec<T> d = centered<T, norm>(v, center);
      squares.part[p] = mul_add<T>(d, d, squares.part[p]);
    };
    const std::size_t whole = a.width / kLanes<T> * kLanes<T>;
    reduce<T>(whole, square, x);
    if (whole < a.width) {
      alignas(64) T rest[kLanes<T>];
      for (std::size_t i = 0; i < kLanes<T>; ++i) rest[i] = whole + i < a.width ? x[whole + i] : mean;
      square(whole % kSumLanes / kLanes<T>, hn::Load(Tag<T>(), rest));
    }
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
void backward(const NormBackward<T>& a, std::size_t begin, std::size_t end) {
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
constexpr NormTable<T> kTable{{&forward<T, RowNorm::layer>, &forward<T, RowNorm::rms>},
                              {&backward<T, RowNorm::layer>, &backward<T, RowNorm::rms>}};
TESSERA_KERNEL_TABLES(NormTable, norm_tables)

}  // namespace
}  // namespace tessera::nn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::nn::kernels {
TESSERA_CHOSEN_KERNELS(NormTable, norm_tables)
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
}  // namespace

template <class T>
void norm_forward(ThreadPool& pool, const NormForward<T>& args) {
  const auto forward = kernels<T>().forward[static_cast<std::size_t>(args.norm)];
  for_tiles(pool, args.rows, row_tile(args.rows),
            [&](std::size_t begin, std::size_t end) { forward(args, begin, end); });
}

template <class T>
void norm_backward(ThreadPool& pool, const NormBackward<T>& args) {
  const std::size_t tile = row_tile(args.rows), tiles = tiles_of(args.rows, tile);
  std::vector<T> dweight(args.dweight ? tiles * args.width : 0), dbias(args.dbias ? tiles * args.width : 0);
  const auto backward = kernels<T>().backward[static_cast<std::size_t>(args.norm)];
  for_tiles(pool, args.rows, tile, [&](std::size_t begin, std::size_t end) {
    NormBackward<T> part = args;
    part.dweight = args.dweight ? dweight.data() + begin / tile * args.width : nullptr;
    part.dbias = args.dbias ? dbias.data() + begin / tile * args.width : nullptr;
    backward(part, begin, end);
  });
  combine(dweight, args.width, args.accumulate_dweight, args.dweight);
  combine(dbias, args.width, args.accumulate_dbias, args.dbias);
}

template void norm_forward<float>(ThreadPool&, const NormForward<float>&);
template void norm_forward<double>(ThreadPool&, const NormForward<double>&);
template void norm_backward<float>(ThreadPool&, const NormBackward<float>&);
template void norm_backward<double>(ThreadPool&, const NormBackward<double>&);

}  // namespace tessera::nn::kernels
#endif  // HWY_ONCE
