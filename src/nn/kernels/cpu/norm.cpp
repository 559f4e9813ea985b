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
  void (*layer_forward)(const LayerNormForward<T>&, std::size_t begin, std::size_t end);
  void (*layer_backward)(const LayerNormBackward<T>&, std::size_t begin, std::size_t end);
  void (*rms_forward)(const RmsNormForward<T>&, std::size_t begin, std::size_t end);
  void (*rms_backward)(const RmsNormBackward<T>&, std::size_t begin, std::size_t end);
};
}  // namespace tessera::nn::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::nn::kernels::HWY_NAMESPACE {
namespace {

template <class T>
void layer_forward(const LayerNormForward<T>& a, std::size_t begin, std::size_t end) {
  const T width = static_cast<T>(a.width);
  for (std::size_t row = begin; row < end; ++row) {
    const T* x = a.x + row * a.width;
    T* y = a.y + row * a.width;
    Sum<T> sum;
    reduce<T>(
        a.width, [&](std::size_t p, Vec<T> v) HWY_ATTR { sum.part[p] = hn::Add(sum.part[p], v); }, x);
    const T mean = sum.total() / width;
    // A second pass over the row, which is in L1, sums around the mean to avoid cancellation. Padding lanes would add
    // mean^2, so a separate pass processes the last part.
    const Vec<T> center = hn::Set(Tag<T>(), mean);
    Sum<T> squares;
    const auto square = [&](std::size_t p, Vec<T> v) HWY_ATTR {
      const Vec<T> d = hn::Sub(v, center);
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
    const auto normalized = [&](Vec<T> v) HWY_ATTR { return hn::Mul(hn::Sub(v, center), factor); };
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

// With g = dy * weight and xhat the normalized row: dx = rstd (g - mean(g) - xhat mean(g xhat)).
template <class T>
void layer_backward(const LayerNormBackward<T>& a, std::size_t begin, std::size_t end) {
  const T width = static_cast<T>(a.width);
  for (std::size_t row = begin; row < end; ++row) {
    const T* x = a.x + row * a.width;
    const T* dy = a.dy + row * a.width;
    const Vec<T> center = hn::Set(Tag<T>(), a.mean[row]);
    const Vec<T> factor = hn::Set(Tag<T>(), a.rstd[row]);
    const auto normalized = [&](Vec<T> v) HWY_ATTR { return hn::Mul(hn::Sub(v, center), factor); };
    add_weight_gradients<T>(a.width, x, dy, normalized, a.dweight, a.dbias);
    if (!a.dx) continue;
    Sum<T> sum, product;
    reduce<T>(
        a.width,
        [&](std::size_t p, Vec<T> v, Vec<T> w, Vec<T> d) HWY_ATTR {
          const Vec<T> g = hn::Mul(d, w);
          sum.part[p] = hn::Add(sum.part[p], g);
          product.part[p] = mul_add<T>(g, normalized(v), product.part[p]);
        },
        x, a.weight, dy);
    const Vec<T> mean_g = hn::Set(Tag<T>(), sum.total() / width);
    const Vec<T> mean_gx = hn::Set(Tag<T>(), product.total() / width);
    map_into<T>(
        a.accumulate_dx, a.dx + row * a.width, a.width,
        [&](Vec<T> v, Vec<T> w, Vec<T> d) HWY_ATTR {
          const Vec<T> rest = neg_mul_add<T>(normalized(v), mean_gx, hn::Sub(hn::Mul(d, w), mean_g));
          return hn::Mul(factor, rest);
        },
        x, a.weight, dy);
  }
}

template <class T>
void rms_forward(const RmsNormForward<T>& a, std::size_t begin, std::size_t end) {
  for (std::size_t row = begin; row < end; ++row) {
    const T* x = a.x + row * a.width;
    Sum<T> squares;
    reduce<T>(
        a.width, [&](std::size_t p, Vec<T> v) HWY_ATTR { squares.part[p] = mul_add<T>(v, v, squares.part[p]); }, x);
    const T rstd = T(1) / std::sqrt(squares.total() / static_cast<T>(a.width) + a.eps);
    const Vec<T> factor = hn::Set(Tag<T>(), rstd);
    map<T>(
        a.y + row * a.width, a.width, [&](Vec<T> v, Vec<T> w) HWY_ATTR { return hn::Mul(hn::Mul(v, factor), w); }, x,
        a.weight);
    if (a.rstd) a.rstd[row] = rstd;
  }
}

template <class T>
void rms_backward(const RmsNormBackward<T>& a, std::size_t begin, std::size_t end) {
  for (std::size_t row = begin; row < end; ++row) {
    const T* x = a.x + row * a.width;
    const T* dy = a.dy + row * a.width;
    const Vec<T> factor = hn::Set(Tag<T>(), a.rstd[row]);
    const auto normalized = [&](Vec<T> v) HWY_ATTR { return hn::Mul(v, factor); };
    add_weight_gradients<T>(a.width, x, dy, normalized, a.dweight, static_cast<T*>(nullptr));
    if (!a.dx) continue;
    Sum<T> product;
    reduce<T>(
        a.width,
        [&](std::size_t p, Vec<T> v, Vec<T> w, Vec<T> d)
            HWY_ATTR { product.part[p] = mul_add<T>(hn::Mul(d, w), normalized(v), product.part[p]); },
        x, a.weight, dy);
    const Vec<T> mean_gx = hn::Set(Tag<T>(), product.total() / static_cast<T>(a.width));
    map_into<T>(
        a.accumulate_dx, a.dx + row * a.width, a.width,
        [&](Vec<T> v, Vec<T> w, Vec<T> d)
            HWY_ATTR { return hn::Mul(factor, neg_mul_add<T>(normalized(v), mean_gx, hn::Mul(d, w))); },
        x, a.weight, dy);
  }
}

template <class T>
constexpr NormTable<T> kTable{&layer_forward<T>, &layer_backward<T>, &rms_forward<T>, &rms_backward<T>};
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
void layer_norm_forward(ThreadPool& pool, const LayerNormForward<T>& args) {
  for_tiles(pool, args.rows, row_tile(args.rows),
            [&](std::size_t begin, std::size_t end) { kernels<T>().layer_forward(args, begin, end); });
}

template <class T>
void layer_norm_backward(ThreadPool& pool, const LayerNormBackward<T>& args) {
  const std::size_t tile = row_tile(args.rows), tiles = tiles_of(args.rows, tile);
  std::vector<T> dweight(args.dweight ? tiles * args.width : 0), dbias(args.dbias ? tiles * args.width : 0);
  for_tiles(pool, args.rows, tile, [&](std::size_t begin, std::size_t end) {
    LayerNormBackward<T> part = args;
    part.dweight = args.dweight ? dweight.data() + begin / tile * args.width : nullptr;
    part.dbias = args.dbias ? dbias.data() + begin / tile * args.width : nullptr;
    kernels<T>().layer_backward(part, begin, end);
  });
  combine(dweight, args.width, args.accumulate_dweight, args.dweight);
  combine(dbias, args.width, args.accumulate_dbias, args.dbias);
}

template <class T>
void rms_norm_forward(ThreadPool& pool, const RmsNormForward<T>& args) {
  for_tiles(pool, args.rows, row_tile(args.rows),
            [&](std::size_t begin, std::size_t end) { kernels<T>().rms_forward(args, begin, end); });
}

template <class T>
void rms_norm_backward(ThreadPool& pool, const RmsNormBackward<T>& args) {
  const std::size_t tile = row_tile(args.rows), tiles = tiles_of(args.rows, tile);
  std::vector<T> dweight(args.dweight ? tiles * args.width : 0);
  for_tiles(pool, args.rows, tile, [&](std::size_t begin, std::size_t end) {
    RmsNormBackward<T> part = args;
    part.dweight = args.dweight ? dweight.data() + begin / tile * args.width : nullptr;
    kernels<T>().rms_backward(part, begin, end);
  });
  combine(dweight, args.width, args.accumulate_dweight, args.dweight);
}

template void layer_norm_forward<float>(ThreadPool&, const LayerNormForward<float>&);
template void layer_norm_forward<double>(ThreadPool&, const LayerNormForward<double>&);
template void layer_norm_backward<float>(ThreadPool&, const LayerNormBackward<float>&);
template void layer_norm_backward<double>(ThreadPool&, const LayerNormBackward<double>&);
template void rms_norm_forward<float>(ThreadPool&, const RmsNormForward<float>&);
template void rms_norm_forward<double>(ThreadPool&, const RmsNormForward<double>&);
template void rms_norm_backward<float>(ThreadPool&, const RmsNormBackward<float>&);
template void rms_norm_backward<double>(ThreadPool&, const RmsNormBackward<double>&);

}  // namespace tessera::nn::kernels
#endif  // HWY_ONCE
