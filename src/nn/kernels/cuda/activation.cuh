// Activations and the gated unit, with the formulas of kernels/cpu/activation.cpp; those of elements of type T compute
// with OpMath<T>.
#pragma once

#include "tessera/nn/kernels/cuda/elementwise.cuh"

namespace tessera::nn::cuda {

using kernels::Activation;

template <class T>
struct Relu {
  using W = OpMath<T>;
  static TESSERA_DEVICE W value(W x) { return x < W(0) ? W(0) : x; }
  static TESSERA_DEVICE W slope(W x) { return x > W(0) ? W(1) : W(0); }
};

// 0.5 (1 + tanh(u)) = logistic(2u), without the cancellation for negative u.
template <class T>
struct GeluTanh {
  using W = OpMath<T>;
  static constexpr double kTwoRoot = 1.59576912160573071176;  // 2 sqrt(2/pi)
  static constexpr double kCubic = kTwoRoot * 0.044715;
  static TESSERA_DEVICE W gate(W x, W square) {
    return logistic<T>(x * fused(square, static_cast<W>(kCubic), static_cast<W>(kTwoRoot)));
  }
  static TESSERA_DEVICE W value(W x) { return x * gate(x, x * x); }
  static TESSERA_DEVICE W slope(W x) {
    const W square = x * x;
    const W s = gate(x, square);
    const W inner = x * fused(square, static_cast<W>(3 * kCubic), static_cast<W>(kTwoRoot));
    return fused(s * (W(1) - s), inner, s);
  }
};

template <class T>
struct GeluErf {
  using W = OpMath<T>;
  static TESSERA_DEVICE W value(W x) { return x * normal_distribution(x).below; }
  static TESSERA_DEVICE W slope(W x) {
    const NormalDistribution<W> n = normal_distribution(x);
    return fused(x, n.density, n.below);
  }
};

template <class T>
struct Silu {
  using W = OpMath<T>;
  static TESSERA_DEVICE W value(W x) { return x * logistic<T>(x); }
  static TESSERA_DEVICE W slope(W x) {
    const W s = logistic<T>(x);
    return fused(x * s, W(1) - s, s);
  }
};

template <class F>
struct ValueOf {
  template <class W>
  TESSERA_DEVICE W operator()(W x) const {
    return F::value(x);
  }
};
template <class F>
struct SlopeTimes {
  template <class W>
  TESSERA_DEVICE W operator()(W x, W dy) const {
    return dy * F::slope(x);
  }
};
template <class T>
struct GateTimes {
  TESSERA_DEVICE OpMath<T> operator()(OpMath<T> gate, OpMath<T> up) const { return Silu<T>::value(gate) * up; }
};

/// Calls `function` with the formulas of `kind` for elements of type T.
template <class T, class Function>
void for_activation(Activation kind, const Function& function) {
  switch (kind) {
    case Activation::relu:
      return function(Relu<T>{});
    case Activation::gelu_tanh:
      return function(GeluTanh<T>{});
    case Activation::gelu_erf:
      return function(GeluErf<T>{});
    case Activation::silu:
      return function(Silu<T>{});
  }
}

template <class T>
void activation_forward(NativeStream stream, const kernels::ActivationForward<T>& a) {
  for_activation<T>(a.kind, [&](auto f) {
    map(stream, a.count, MapBody<T, ValueOf<decltype(f)>>{a.x, a.y, false, {}});
  });
}
template <class T>
void activation_backward(NativeStream stream, Activation kind, const kernels::ActivationBackward<T>& a) {
  for_activation<T>(kind, [&](auto f) {
    zip(stream, a.count, ZipBody<T, SlopeTimes<decltype(f)>>{a.x, a.dy, a.dx, a.accumulate, {}});
  });
}
template <class T>
void swiglu_forward(NativeStream stream, const kernels::SwigluForward<T>& a) {
  zip(stream, a.count, ZipBody<T, GateTimes<T>>{a.gate, a.up, a.y, false, {}});
}

/// Reads each input once for both gradients, because each gradient may overwrite an input.
template <class T>
struct SwigluBackwardBody {
  kernels::SwigluBackward<T> a;
  template <int n>
  TESSERA_DEVICE void step(std::size_t i) const {
    using W = OpMath<T>;
    const Pack<T, n> gate = load<n>(a.gate + i), up = load<n>(a.up + i), dy = load<n>(a.dy + i);
    Pack<T, n> dgate = {}, dup = {};
    if (a.dgate && a.accumulate_dgate) dgate = load<n>(static_cast<const T*>(a.dgate) + i);
    if (a.dup && a.accumulate_dup) dup = load<n>(static_cast<const T*>(a.dup) + i);
    for (int e = 0; e < n; ++e) {
      const W g = to_opmath(gate.at[e]), d = to_opmath(dy.at[e]);
      dgate.at[e] = added(a.accumulate_dgate, dgate.at[e], d * to_opmath(up.at[e]) * Silu<T>::slope(g));
      dup.at[e] = added(a.accumulate_dup, dup.at[e], d * Silu<T>::value(g));
    }
    if (a.dgate) store<n>(a.dgate + i, dgate);
    if (a.dup) store<n>(a.dup + i, dup);
  }
};
template <class T>
void swiglu_backward(NativeStream stream, const kernels::SwigluBackward<T>& a) {
  for_elements<kVector<T>>(stream, a.count, {a.gate, a.up, a.dy, a.dgate, a.dup}, SwigluBackwardBody<T>{a});
}

}  // namespace tessera::nn::cuda
