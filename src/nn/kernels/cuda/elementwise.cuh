// Element-wise kernels, which process whole vectors of 16 bytes.
#pragma once

#include <initializer_list>

#include "tessera/nn/kernels/cuda/math.cuh"
#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn::cuda {

/// `count` adjacent elements, loaded and stored at once.
template <class T, int count>
struct alignas(sizeof(T) * count) Pack {
  T at[count];
};

/// Body::step<n>(i) computes elements [i, i + n).
template <int width, class Body>
TESSERA_KERNEL void elements_kernel(std::size_t count, const TESSERA_GRID_CONSTANT Body body) {
  const std::size_t packs = count / width;
  const std::size_t thread = block_index() * thread_count() + thread_index();
  const std::size_t stride = block_count() * thread_count();
  for (std::size_t i = thread; i < packs; i += stride) body.template step<width>(i * width);
  if (width > 1 && packs * width + thread < count) body.template step<1>(packs * width + thread);
}

inline bool aligned(std::initializer_list<const void*> pointers) {
  std::uintptr_t bits = 0;
  for (const void* pointer : pointers) bits |= reinterpret_cast<std::uintptr_t>(pointer);
  return bits % 16 == 0;
}

/// `pointers`: all arrays that the body reads or writes. Uses vectors if all of them are aligned to 16 bytes.
template <int width, class Body>
void for_elements(NativeStream stream, std::size_t count, std::initializer_list<const void*> pointers,
                  const Body& body) {
  constexpr std::size_t kMaxBlocks = 132 * 16;  // enough for all multiprocessors; each then runs several rounds
  const auto grid = [count](std::size_t per_thread) {
    const std::size_t blocks = divided_up(divided_up(count, per_thread), 256);
    return Grid{.blocks = blocks < kMaxBlocks ? blocks : kMaxBlocks};
  };
  if (count == 0) return;
  if (aligned(pointers)) return launch(stream, grid(width), elements_kernel<width, Body>, count, body);
  launch(stream, grid(1), elements_kernel<1, Body>, count, body);
}

/// Number of elements of T in 16 bytes.
template <class T>
inline constexpr int kVector = static_cast<int>(16 / sizeof(T));

template <int n, class T>
TESSERA_DEVICE Pack<T, n> load(const T* from) {
  return load_whole(reinterpret_cast<const Pack<T, n>*>(from));
}
template <int n, class T>
TESSERA_DEVICE void store(T* to, const Pack<T, n>& pack) {
  store_whole(reinterpret_cast<Pack<T, n>*>(to), pack);
}
/// 16 bytes in four registers; the elements of a Pack of 16-bit types may take one each.
struct alignas(16) Packed {
  std::uint32_t words[4];
};

/// The kVector<T> elements from `from` on. `whole`: all exist, and they are aligned; else the first `valid` exist, and
/// zeros follow.
template <class T>
TESSERA_DEVICE Packed load_packed(const T* from, bool whole, std::size_t valid) {
  if (whole) return load_whole(reinterpret_cast<const Packed*>(from));
  Pack<T, kVector<T>> values;
  TESSERA_UNROLL
  for (int e = 0; e < kVector<T>; ++e) values.at[e] = static_cast<std::size_t>(e) < valid ? from[e] : from_opmath<T>(0);
  return bits_as<Packed>(values);
}
template <int n, class T>
TESSERA_DEVICE Pack<T, n> load_part(const T* from, bool whole, std::size_t valid) {
  return bits_as<Pack<T, n>>(load_packed(from, whole, valid));
}
/// Stores what load_part() loads.
template <int n, class T>
TESSERA_DEVICE void store_part(T* to, const Pack<T, n>& values, bool whole, std::size_t valid) {
  if (whole) return store_whole(reinterpret_cast<Pack<T, n>*>(to), values);
  TESSERA_UNROLL
  for (int e = 0; e < n; ++e)
    if (static_cast<std::size_t>(e) < valid) to[e] = values.at[e];
}
/// Returns `value`, added to `before` if `accumulate`.
template <class T>
TESSERA_DEVICE T added(bool accumulate, T before, OpMath<T> value) {
  return from_opmath<T>(accumulate ? to_opmath(before) + value : value);
}
/// Replaces an element by `value`, or adds it to the element if `accumulate`.
template <class T>
TESSERA_DEVICE void add_to(T* at, bool accumulate, OpMath<T> value) {
  store_whole(at, added(accumulate, accumulate ? load_whole(at) : T{}, value));
}

template <class T>
struct FillBody {
  T value;
  T* out;
  template <int n>
  TESSERA_DEVICE void step(std::size_t i) const {
    Pack<T, n> result;
    for (int e = 0; e < n; ++e) result.at[e] = value;
    store<n>(out + i, result);
  }
};

/// out = function(x), or out += function(x).
template <class T, class Function>
struct MapBody {
  const T* x;
  T* out;
  bool accumulate;
  Function function;
  template <int n>
  TESSERA_DEVICE void step(std::size_t i) const {
    const Pack<T, n> in = load<n>(x + i);
    Pack<T, n> result = {};
    if (accumulate) result = load<n>(static_cast<const T*>(out) + i);
    for (int e = 0; e < n; ++e) result.at[e] = added(accumulate, result.at[e], function(to_opmath(in.at[e])));
    store<n>(out + i, result);
  }
};

/// out = function(a, b), or out += function(a, b).
template <class T, class Function>
struct ZipBody {
  const T* a;
  const T* b;
  T* out;
  bool accumulate;
  Function function;
  template <int n>
  TESSERA_DEVICE void step(std::size_t i) const {
    const Pack<T, n> left = load<n>(a + i), right = load<n>(b + i);
    Pack<T, n> result = {};
    if (accumulate) result = load<n>(static_cast<const T*>(out) + i);
    for (int e = 0; e < n; ++e)
      result.at[e] = added(accumulate, result.at[e], function(to_opmath(left.at[e]), to_opmath(right.at[e])));
    store<n>(out + i, result);
  }
};

template <class W>
struct Same {
  TESSERA_DEVICE W operator()(W x) const { return x; }
};
template <class W>
struct Times {
  W factor;
  TESSERA_DEVICE W operator()(W x) const { return factor * x; }
};
template <class W>
struct Plus {
  TESSERA_DEVICE W operator()(W a, W b) const { return a + b; }
};

template <class T, class Function>
void map(NativeStream stream, std::size_t count, const MapBody<T, Function>& body) {
  for_elements<kVector<T>>(stream, count, {body.x, body.out}, body);
}
template <class T, class Function>
void zip(NativeStream stream, std::size_t count, const ZipBody<T, Function>& body) {
  for_elements<kVector<T>>(stream, count, {body.a, body.b, body.out}, body);
}

/// y[rows, columns] += bias[columns] in every row
template <class T>
struct RowBiasBody {
  const T* bias;
  T* y;
  std::size_t columns;
  template <int n>
  TESSERA_DEVICE void step(std::size_t i) const {
    for (int e = 0; e < n; ++e) y[i + e] = from_opmath<T>(to_opmath(y[i + e]) + to_opmath(bias[(i + e) % columns]));
  }
};

/// Converts between any two of f32, f16 and bf16, in vectors of 16 bytes of the wider type.
template <class From, class To>
struct ConvertBody {
  const From* in;
  To* out;
  template <int n>
  TESSERA_DEVICE void step(std::size_t i) const {
    const Pack<From, n> from = load<n>(in + i);
    Pack<To, n> result;
    for (int e = 0; e < n; ++e) result.at[e] = from_opmath<To>(to_opmath(from.at[e]));
    store<n>(out + i, result);
  }
};
template <class From, class To>
void convert(NativeStream stream, const ConvertArgs& args) {
  const ConvertBody<From, To> body{static_cast<const From*>(args.in), static_cast<To*>(args.out)};
  constexpr int kWidth = kVector<From> < kVector<To> ? kVector<From> : kVector<To>;
  for_elements<kWidth>(stream, args.count, {args.in, args.out}, body);
}

struct PositionsBody {
  std::int32_t* out;
  std::size_t period;
  template <int n>
  TESSERA_DEVICE void step(std::size_t i) const {
    for (int e = 0; e < n; ++e) out[i + e] = static_cast<std::int32_t>((i + e) % period);
  }
};

/// Transposes tiles of 32 x 32 through shared memory, so that reads and writes both follow rows.
template <class T>
TESSERA_KERNEL void transpose_kernel(TransposeArgs<T> a) {
  constexpr std::size_t kTile = 32;
  T* tile = shared_memory<T>();  // [32, 33]: no two rows start in the same bank
  const std::size_t across = divided_up(a.columns, kTile), down = divided_up(a.rows, kTile);
  const std::size_t batch = block_index() / (across * down), place = block_index() % (across * down);
  const std::size_t row = place / across * kTile, column = place % across * kTile;
  const T* in = a.in + batch * a.rows * a.columns;
  T* out = a.out + batch * a.rows * a.columns;
  const std::size_t x = thread_index() % kTile;
  for (std::size_t y = thread_index() / kTile; y < kTile; y += thread_count() / kTile)
    if (row + y < a.rows && column + x < a.columns) tile[y * 33 + x] = in[(row + y) * a.columns + column + x];
  sync_block();
  for (std::size_t y = thread_index() / kTile; y < kTile; y += thread_count() / kTile)
    if (column + y < a.columns && row + x < a.rows) out[(column + y) * a.rows + row + x] = tile[x * 33 + y];
}
template <class T>
void transpose(NativeStream stream, const TransposeArgs<T>& args) {
  const std::size_t blocks = args.batch * divided_up(args.columns, 32) * divided_up(args.rows, 32);
  launch(stream, {.blocks = blocks, .threads = 256, .shared = 32 * 33 * sizeof(T)}, transpose_kernel<T>, args);
}

// Activations and the gated unit, with the formulas of kernels/cpu/elementwise.cpp; those of elements of type T compute
// with OpMath<T>.

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
