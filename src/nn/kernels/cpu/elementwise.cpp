#include "tessera/nn/kernels/elementwise.h"

#include <cstring>
#include <string>

#include "tessera/base/error.h"
#include "tessera/base/half_loops-inl.h"
#include "tessera/base/vectorize-inl.h"
#include "tessera/nn/kernels/activation.h"
#include "tessera/nn/kernels/cpu/tiles.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/nn/kernels/cpu/elementwise.cpp"
#include "hwy/foreach_target.h"  // includes this file once per instruction set

#include "tessera/nn/kernels/cpu/math-inl.h"

#ifndef TESSERA_NN_KERNELS_ELEMENTWISE_ONCE
#define TESSERA_NN_KERNELS_ELEMENTWISE_ONCE
namespace tessera::nn::kernels {
template <class T>
struct ElementwiseTable {
  void (*add)(const T* a, const T* b, T* out, std::size_t count);
  void (*scale)(const ScaleArgs<T>&);
  void (*column_sums)(const ColumnSumsArgs<T>&, std::size_t begin, std::size_t end);
  void (*forward[4])(const T*, T*, std::size_t);  // by Activation
  void (*backward[4])(const ActivationBackward<T>&);
  void (*swiglu_forward)(const T*, const T*, T*, std::size_t);
  void (*swiglu_backward)(const SwigluBackward<T>&);
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
struct Relu {
  static HWY_INLINE Vec<T> value(Vec<T> x) { return hn::IfThenZeroElse(hn::Lt(x, hn::Zero(Tag<T>())), x); }
  static HWY_INLINE Vec<T> slope(Vec<T> x) { return hn::IfThenElseZero(hn::Gt(x, hn::Zero(Tag<T>())), set<T>(1)); }
};

// 0.5 (1 + tanh(u)) = sigmoid(2u), without the cancellation for negative u.
template <class T>
struct GeluTanh {
  static constexpr double kTwoRoot = 1.59576912160573071176;  // 2 sqrt(2/pi)
  static constexpr double kCubic = kTwoRoot * 0.044715;
  static HWY_INLINE Vec<T> gate(Vec<T> x, Vec<T> square) {
    return sigmoid<T>(hn::Mul(x, mul_add<T>(square, set<T>(kCubic), set<T>(kTwoRoot))));
  }
  static HWY_INLINE Vec<T> value(Vec<T> x) { return hn::Mul(x, gate(x, hn::Mul(x, x))); }
  static HWY_INLINE Vec<T> slope(Vec<T> x) {
    const Vec<T> square = hn::Mul(x, x);
    const Vec<T> s = gate(x, square);
    const Vec<T> inner = hn::Mul(x, mul_add<T>(square, set<T>(3 * kCubic), set<T>(kTwoRoot)));
    return mul_add<T>(hn::Mul(s, hn::Sub(set<T>(1), s)), inner, s);
  }
};

template <class T>
struct GeluErf {
  static HWY_INLINE Vec<T> value(Vec<T> x) { return hn::Mul(x, normal<T>(x).below); }
  static HWY_INLINE Vec<T> slope(Vec<T> x) {
    const Normal<T> n = normal<T>(x);
    return mul_add<T>(x, n.density, n.below);
  }
};

template <class T>
struct Silu {
  static HWY_INLINE Vec<T> value(Vec<T> x) { return hn::Mul(x, sigmoid<T>(x)); }
  static HWY_INLINE Vec<T> slope(Vec<T> x) {
    const Vec<T> s = sigmoid<T>(x);
    return mul_add<T>(hn::Mul(x, s), hn::Sub(set<T>(1), s), s);
  }
};

template <template <class> class F, class T>
void forward(const T* x, T* y, std::size_t count) {
  map<T>(
      y, count, [](Vec<T> v) HWY_ATTR { return F<T>::value(v); }, x);
}

template <template <class> class F, class T>
void backward(const ActivationBackward<T>& a) {
  map_into<T>(
      a.accumulate, a.dx, a.count, [](Vec<T> x, Vec<T> dy) HWY_ATTR { return hn::Mul(dy, F<T>::slope(x)); }, a.x, a.dy);
}

template <class T>
void swiglu_forward(const T* gate, const T* up, T* y, std::size_t count) {
  map<T>(
      y, count, [](Vec<T> g, Vec<T> u) HWY_ATTR { return hn::Mul(Silu<T>::value(g), u); }, gate, up);
}

template <class T>
void swiglu_backward(const SwigluBackward<T>& a) {
  // Reads each input once for both gradients, because each gradient may overwrite an input.
  for_slots<T>(a.count, [&](Slot<T> slot) HWY_ATTR {
    const Vec<T> gate = slot.read(a.gate), up = slot.read(a.up), dy = slot.read(a.dy);
    const auto write = [&slot](bool accumulate, Vec<T> value, T* to)
                           HWY_ATTR { slot.write(accumulate ? hn::Add(slot.read(to), value) : value, to); };
    if (a.dgate) write(a.accumulate_dgate, hn::Mul(hn::Mul(dy, up), Silu<T>::slope(gate)), a.dgate);
    if (a.dup) write(a.accumulate_dup, hn::Mul(dy, Silu<T>::value(gate)), a.dup);
  });
}

template <class T>
constexpr ElementwiseTable<T> kTable{
    &add<T>,
    &scale<T>,
    &column_sums<T>,
    {&forward<Relu, T>, &forward<GeluTanh, T>, &forward<GeluErf, T>, &forward<Silu, T>},
    {&backward<Relu, T>, &backward<GeluTanh, T>, &backward<GeluErf, T>, &backward<Silu, T>},
    &swiglu_forward<T>,
    &swiglu_backward<T>};
TESSERA_KERNEL_TABLES(ElementwiseTable, elementwise_tables)

// Loops that the compiler vectorizes.
template <class In, class Out>
void convert_range(const void* in, void* out, std::size_t begin, std::size_t end) {
  const In* const from = static_cast<const In*>(in);
  Out* const to = static_cast<Out*>(out);
  TESSERA_INDEPENDENT_ITERATIONS
  for (std::size_t i = begin; i < end; ++i) to[i] = base::from_float<Out>(base::to_float(from[i]));
}

/// Converts elements [begin, end); null: no kernel.
using Loop = void (*)(const void* in, void* out, std::size_t begin, std::size_t end);

template <class In>
Loop loop_to(base::DType to) {
  if (to == base::DType::f32) return &convert_range<In, float>;
  if (to == base::DType::f16) return &convert_range<In, base::f16>;
  return to == base::DType::bf16 ? &convert_range<In, base::bf16> : nullptr;
}

Loop loop_of(base::DType from, base::DType to) {
  if (from == to) return nullptr;
  if (from == base::DType::f32) return loop_to<float>(to);
  if (from == base::DType::f16) return loop_to<base::f16>(to);
  return from == base::DType::bf16 ? loop_to<base::bf16>(to) : nullptr;
}

}  // namespace
}  // namespace tessera::nn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::nn::kernels {
TESSERA_CHOSEN_KERNELS(ElementwiseTable, elementwise_tables)
HWY_EXPORT(loop_of);
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

template <class T>
void activation_forward(ThreadPool& pool, Activation kind, const T* x, T* y, std::size_t count) {
  const auto forward = kernels<T>().forward[static_cast<std::size_t>(kind)];
  for_tiles(pool, count, kElementTile,
            [&](std::size_t begin, std::size_t end) { forward(x + begin, y + begin, end - begin); });
}

template <class T>
void activation_backward(ThreadPool& pool, Activation kind, const ActivationBackward<T>& args) {
  const auto backward = kernels<T>().backward[static_cast<std::size_t>(kind)];
  for_tiles(pool, args.count, kElementTile, [&](std::size_t begin, std::size_t end) {
    backward({args.x + begin, args.dy + begin, args.dx + begin, end - begin, args.accumulate});
  });
}

template <class T>
void swiglu_forward(ThreadPool& pool, const T* gate, const T* up, T* y, std::size_t count) {
  for_tiles(pool, count, kElementTile, [&](std::size_t begin, std::size_t end) {
    kernels<T>().swiglu_forward(gate + begin, up + begin, y + begin, end - begin);
  });
}

template <class T>
void swiglu_backward(ThreadPool& pool, const SwigluBackward<T>& args) {
  for_tiles(pool, args.count, kElementTile, [&](std::size_t begin, std::size_t end) {
    SwigluBackward<T> part = args;
    part.gate += begin;
    part.up += begin;
    part.dy += begin;
    if (part.dgate) part.dgate += begin;
    if (part.dup) part.dup += begin;
    part.count = end - begin;
    kernels<T>().swiglu_backward(part);
  });
}

template void activation_forward<float>(ThreadPool&, Activation, const float*, float*, std::size_t);
template void activation_forward<double>(ThreadPool&, Activation, const double*, double*, std::size_t);
template void activation_backward<float>(ThreadPool&, Activation, const ActivationBackward<float>&);
template void activation_backward<double>(ThreadPool&, Activation, const ActivationBackward<double>&);
template void swiglu_forward<float>(ThreadPool&, const float*, const float*, float*, std::size_t);
template void swiglu_forward<double>(ThreadPool&, const double*, const double*, double*, std::size_t);
template void swiglu_backward<float>(ThreadPool&, const SwigluBackward<float>&);
template void swiglu_backward<double>(ThreadPool&, const SwigluBackward<double>&);

void convert(ThreadPool& pool, const ConvertArgs& a) {
  const auto loop = HWY_DYNAMIC_DISPATCH(loop_of)(a.from, a.to);
  if (loop == nullptr)
    throw base::Unsupported("convert: no kernel from " + std::string(base::name_of(a.from)) + " to " +
                            std::string(base::name_of(a.to)) + " on the host");
  for_tiles(pool, a.count, kElementTile, [&](std::size_t begin, std::size_t end) { loop(a.in, a.out, begin, end); });
}

}  // namespace tessera::nn::kernels
#endif  // HWY_ONCE
