#include "tessera/nn/kernels/activation.h"

#include "tessera/nn/kernels/cpu/tiles.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/nn/kernels/cpu/activation.cpp"
#include "hwy/foreach_target.h"  // includes this file once per instruction set

#include "tessera/nn/kernels/cpu/math-inl.h"

#ifndef TESSERA_NN_KERNELS_ACTIVATION_ONCE
#define TESSERA_NN_KERNELS_ACTIVATION_ONCE
namespace tessera::nn::kernels {
template <class T>
struct ActivationTable {
  void (*forward[4])(const T*, T*, std::size_t);  // by Activation
  void (*backward[4])(const ActivationBackward<T>&);
  void (*swiglu_forward)(const T*, const T*, T*, std::size_t);
  void (*swiglu_backward)(const SwigluBackward<T>&);
};
}  // namespace tessera::nn::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::nn::kernels::HWY_NAMESPACE {
namespace {

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
  constexpr std::size_t kStep = kLanes<T>;
  // Reads each input once for both gradients, because each gradient may overwrite an input.
  for (std::size_t i = 0; i < a.count; i += kStep) {
    const std::size_t n = std::min(kStep, a.count - i);
    const auto read = [n](const T* from) HWY_ATTR { return n == kStep ? load<T>(from) : load_part<T>(from, n); };
    const auto write = [n, &read](bool accumulate, Vec<T> value, T* to) HWY_ATTR {
      if (accumulate) value = hn::Add(read(to), value);
      if (n == kStep)
        store<T>(value, to);
      else
        store_part<T>(value, to, n);
    };
    const Vec<T> gate = read(a.gate + i), up = read(a.up + i), dy = read(a.dy + i);
    if (a.dgate) write(a.accumulate_dgate, hn::Mul(hn::Mul(dy, up), Silu<T>::slope(gate)), a.dgate + i);
    if (a.dup) write(a.accumulate_dup, hn::Mul(dy, Silu<T>::value(gate)), a.dup + i);
  }
}

template <class T>
constexpr ActivationTable<T> kTable{
    {&forward<Relu, T>, &forward<GeluTanh, T>, &forward<GeluErf, T>, &forward<Silu, T>},
    {&backward<Relu, T>, &backward<GeluTanh, T>, &backward<GeluErf, T>, &backward<Silu, T>},
    &swiglu_forward<T>,
    &swiglu_backward<T>};
TESSERA_KERNEL_TABLES(ActivationTable, activation_tables)

}  // namespace
}  // namespace tessera::nn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::nn::kernels {
TESSERA_CHOSEN_KERNELS(ActivationTable, activation_tables)

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

}  // namespace tessera::nn::kernels
#endif  // HWY_ONCE
