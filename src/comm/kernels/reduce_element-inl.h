// Reduces one element in the order of the tree: the arithmetic of deterministic mode, with the bits of the host's
// reduce_tree. Plain C++ for both the CUDA and the host compiler, so that a test compares it with reduce_tree on any
// machine. Compile it without contraction: multiply-adds must not be fused.
#pragma once

#include <cstdint>
#include <type_traits>

#include "tessera/base/half_loops-inl.h"
#include "tessera/comm/types.h"

#ifdef __CUDACC__
#define TESSERA_HD __host__ __device__
#else
#define TESSERA_HD
#endif

namespace tessera::comm {

/// How an element is reduced, and the conversions to and from the type used for it, inline as those of
/// half_loops-inl.h.
template <class T>
struct SumNumber {
  using Sum = T;
  [[gnu::always_inline]] TESSERA_HD static Sum load(T x) { return x; }
  [[gnu::always_inline]] TESSERA_HD static T store(Sum x) { return x; }
};

/// Halves are reduced in f32.
template <class Half>
struct HalfSumNumber {
  using Sum = float;
  [[gnu::always_inline]] TESSERA_HD static Sum load(Half x) { return base::to_float(x); }
  [[gnu::always_inline]] TESSERA_HD static Half store(Sum x) { return base::from_float<Half>(x); }
};
template <>
struct SumNumber<bf16> : HalfSumNumber<bf16> {};
template <>
struct SumNumber<f16> : HalfSumNumber<f16> {};

template <class S>
TESSERA_HD S sum_combine(ReduceOp::Kind kind, S a, S b) {
  using Kind = ReduceOp::Kind;
  if constexpr (std::is_floating_point_v<S>) {
    if (kind == Kind::prod) return a * b;
    if (kind == Kind::min) return a != a ? a : (b != b ? b : (a < b ? a : b));
    if (kind == Kind::max) return a != a ? a : (b != b ? b : (a > b ? a : b));
    return a + b;
  } else if constexpr (std::is_same_v<S, bool>) {
    if (kind == Kind::prod || kind == Kind::min || kind == Kind::bit_and) return a && b;
    if (kind == Kind::bit_xor) return a != b;
    return a || b;
  } else {  // wraps in 64 bits; a promotion to int might overflow
    using U = std::make_unsigned_t<S>;
    if (kind == Kind::prod)
      return static_cast<S>(static_cast<U>(static_cast<std::uint64_t>(static_cast<U>(a)) * static_cast<U>(b)));
    if (kind == Kind::min) return a < b ? a : b;
    if (kind == Kind::max) return a > b ? a : b;
    if (kind == Kind::bit_and) return static_cast<S>(static_cast<U>(a) & static_cast<U>(b));
    if (kind == Kind::bit_or) return static_cast<S>(static_cast<U>(a) | static_cast<U>(b));
    if (kind == Kind::bit_xor) return static_cast<S>(static_cast<U>(a) ^ static_cast<U>(b));
    return static_cast<S>(static_cast<U>(static_cast<std::uint64_t>(static_cast<U>(a)) + static_cast<U>(b)));
  }
}

template <class S>
TESSERA_HD S sum_scalar(double value) {
  if constexpr (std::is_floating_point_v<S>) {
    return static_cast<S>(value);
  } else {
    return static_cast<S>(static_cast<std::int64_t>(value));
  }
}

/// The sum divided by avg's divisor, which may be larger than any integer of this type.
template <class S>
TESSERA_HD S sum_quotient(S sum, double divisor) {
  const S by = sum_scalar<S>(divisor);
  if constexpr (!std::is_floating_point_v<S>) {
    const auto wide = static_cast<std::int64_t>(divisor);
    if (by <= 0 || static_cast<std::int64_t>(by) != wide) return static_cast<S>(static_cast<std::int64_t>(sum) / wide);
  }
  return static_cast<S>(sum / by);
}

/// One element of a source; only premul_sum uses its factor.
template <class T>
TESSERA_HD typename SumNumber<T>::Sum sum_leaf(const ReduceOp& op, T element, const double& factor) {
  using S = typename SumNumber<T>::Sum;
  const S x = SumNumber<T>::load(element);
  if (op.kind != ReduceOp::Kind::premul_sum) return x;
  return sum_combine(ReduceOp::Kind::prod, x, sum_scalar<S>(factor));
}

/// sum(a..b) = sum(a..m) + sum(m..b), where `leaf(k)` is source k's.
template <class S, class Leaf>
TESSERA_HD S sum_range(ReduceOp::Kind kind, const Leaf& leaf, int a, int b) {
  if (b - a == 1) return leaf(a);
  const int m = a + (b - a) / 2;
  const S left = sum_range<S>(kind, leaf, a, m);
  return sum_combine(kind, left, sum_range<S>(kind, leaf, m, b));
}

/// One element of the result over the sources 0 .. `count`.
template <class T, class Leaf>
TESSERA_HD T sum_element(const ReduceOp& op, const Leaf& leaf, int count) {
  using S = typename SumNumber<T>::Sum;
  S sum = sum_range<S>(op.kind, leaf, 0, count);
  if constexpr (!std::is_same_v<S, bool>)  // which has no average
    if (op.kind == ReduceOp::Kind::avg) sum = sum_quotient(sum, op.scalar);
  return SumNumber<T>::store(sum);
}

}  // namespace tessera::comm
