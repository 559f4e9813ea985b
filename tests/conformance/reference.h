// The results that every backend must compute, written as simply as possible: one element after the other, by the tree
// of docs/collectives.md.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/comm/slices.h"
#include "tessera/comm/types.h"

namespace tessera::conformance {

using namespace tessera::base;
using namespace tessera::comm;

using Bytes = std::vector<std::byte>;

/// Calls `f` with a value of the type of `dtype`.
template <class F>
auto with_type(DType dtype, F&& call) {
  switch (dtype) {
    case DType::f32:
      return call(float{});
    case DType::f64:
      return call(double{});
    case DType::f16:
      return call(f16{});
    case DType::bf16:
      return call(bf16{});
    case DType::i8:
      return call(std::int8_t{});
    case DType::u8:
      return call(std::uint8_t{});
    case DType::i32:
      return call(std::int32_t{});
    case DType::i64:
      return call(std::int64_t{});
    case DType::u32:
      return call(std::uint32_t{});
    case DType::u64:
      return call(std::uint64_t{});
    case DType::i16:
      return call(std::int16_t{});
    case DType::boolean:
      break;
  }
  return call(bool{});
}

inline std::uint64_t scramble(std::uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdu;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53u;
  return x ^ (x >> 33);
}

/// Element `i` of the input of rank `rank`. Floats near 1 with full mantissas (so that the order of a sum matters),
/// occasionally a zero, a huge value or a NaN; integers over their whole range, so that sums wrap.
template <class T>
T element(std::uint64_t seed, int rank, std::size_t i) {
  const std::uint64_t bits = scramble(seed * 1000003 + static_cast<std::uint64_t>(rank) * 7919 + i * 104729 + 12345);
  if constexpr (std::is_same_v<T, bool>) {
    return bits % 3 == 0;
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(bits);
  } else {
    const double value = (static_cast<double>(bits >> 11) * 0x1p-53 - 0.5) * 4;
    if (bits % 97 == 0) return T(static_cast<float>(0.0));
    if (bits % 101 == 0) return T(static_cast<float>(value * 1e4));
    if (bits % 997 == 0) return T(std::nanf(""));
    if constexpr (std::is_same_v<T, double>)
      return value;
    else
      return T(static_cast<float>(value));
  }
}

inline Bytes make_input(DType dtype, std::uint64_t seed, int rank, std::size_t count) {
  Bytes bytes(count * size_of(dtype));
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    for (std::size_t i = 0; i < count; ++i) {
      const T value = element<T>(seed, rank, i);
      std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
    }
  });
  return bytes;
}

template <class T>
using SumOf = std::conditional_t<std::is_same_v<T, f16> || std::is_same_v<T, bf16>, float, T>;

template <class S>
S combine(ReduceOp::Kind kind, S a, S b) {
  if constexpr (std::is_floating_point_v<S>) {
    switch (kind) {
      case ReduceOp::Kind::prod:
        return a * b;
      case ReduceOp::Kind::min:
        return std::isnan(a) ? a : (std::isnan(b) ? b : (a < b ? a : b));
      case ReduceOp::Kind::max:
        return std::isnan(a) ? a : (std::isnan(b) ? b : (a > b ? a : b));
      default:
        return a + b;
    }
  } else if constexpr (std::is_same_v<S, bool>) {
    const bool both = kind == ReduceOp::Kind::prod || kind == ReduceOp::Kind::min || kind == ReduceOp::Kind::bit_and;
    return both ? a && b : kind == ReduceOp::Kind::bit_xor ? a != b : a || b;
  } else {
    using U = std::uint64_t;  // wraps, and its low bits are those of S
    switch (kind) {
      case ReduceOp::Kind::bit_and:
        return static_cast<S>(static_cast<U>(a) & static_cast<U>(b));
      case ReduceOp::Kind::bit_or:
        return static_cast<S>(static_cast<U>(a) | static_cast<U>(b));
      case ReduceOp::Kind::bit_xor:
        return static_cast<S>(static_cast<U>(a) ^ static_cast<U>(b));
      case ReduceOp::Kind::prod:
        return static_cast<S>(static_cast<U>(a) * static_cast<U>(b));
      case ReduceOp::Kind::min:
        return a < b ? a : b;
      case ReduceOp::Kind::max:
        return a > b ? a : b;
      default:
        return static_cast<S>(static_cast<U>(a) + static_cast<U>(b));
    }
  }
}

template <class S>
S tree(ReduceOp::Kind kind, const std::vector<S>& values, std::size_t a, std::size_t b) {
  if (b - a == 1) return values[a];
  const std::size_t m = tree_middle(a, b);
  return combine(kind, tree(kind, values, a, m), tree(kind, values, m, b));
}

/// Reduces the inputs of all ranks element by element. premul_sum: rank r's factor is `factor(r)`.
inline double factor(int rank) { return rank + 2; }

inline Bytes reduce(DType dtype, ReduceOp op, const std::vector<Bytes>& inputs) {
  Bytes out(inputs.front().size());
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = SumOf<T>;
    std::vector<S> values(inputs.size());
    for (std::size_t i = 0; i < out.size() / sizeof(T); ++i) {
      for (std::size_t r = 0; r < inputs.size(); ++r) {
        T raw;
        std::memcpy(&raw, inputs[r].data() + i * sizeof(T), sizeof(T));
        values[r] = static_cast<S>(raw);
        if (op.kind == ReduceOp::Kind::premul_sum)
          values[r] = combine<S>(ReduceOp::Kind::prod, values[r], static_cast<S>(factor(static_cast<int>(r))));
      }
      S sum = tree(op.kind, values, 0, values.size());
      if constexpr (!std::is_same_v<S, bool>)
        if (op.kind == ReduceOp::Kind::avg)
          sum = static_cast<S>(sum / static_cast<S>(op.scalar == 0 ? static_cast<double>(inputs.size()) : op.scalar));
      const T result = static_cast<T>(sum);
      std::memcpy(out.data() + i * sizeof(T), &result, sizeof(T));
    }
  });
  return out;
}

/// Returns the index of the first element that differs, or -1. NaNs are equal whatever their payload.
inline std::ptrdiff_t first_difference(DType dtype, const std::byte* a, const std::byte* b, std::size_t count) {
  if (count == 0 || std::memcmp(a, b, count * size_of(dtype)) == 0) return -1;
  return with_type(dtype, [&](auto zero) -> std::ptrdiff_t {
    using T = decltype(zero);
    for (std::size_t i = 0; i < count; ++i) {
      T x;
      T y;
      std::memcpy(&x, a + i * sizeof(T), sizeof(T));
      std::memcpy(&y, b + i * sizeof(T), sizeof(T));
      if (std::memcmp(&x, &y, sizeof(T)) == 0) continue;
      if constexpr (!std::is_integral_v<T>)
        if (std::isnan(static_cast<SumOf<T>>(x)) && std::isnan(static_cast<SumOf<T>>(y))) continue;
      return static_cast<std::ptrdiff_t>(i);
    }
    return -1;
  });
}

/// The allowed distance of an element from the tree's sum if a communicator adds in another order, and rounds `ulps`
/// units of the last place on the way, as the reference may too: terms that cancel count with their magnitudes.
/// Infinite if an intermediate result may overflow.
template <class T>
double tolerance(ReduceOp op, const std::vector<double>& values, double ulps) {
  using Kind = ReduceOp::Kind;
  if (op.kind == Kind::min || op.kind == Kind::max) return 0;
  const double epsilon = std::is_same_v<T, f16>     ? 0x1p-10
                         : std::is_same_v<T, bf16>  ? 0x1p-7
                         : std::is_same_v<T, float> ? 0x1p-23
                                                    : 0x1p-52;
  const double largest = std::is_same_v<T, f16> ? 65504.0 : std::is_same_v<T, double> ? 0x1p1023 : 0x1p127;
  const double smallest = std::is_same_v<T, f16>     ? 0x1p-24
                          : std::is_same_v<T, bf16>  ? 0x1p-133
                          : std::is_same_v<T, float> ? 0x1p-149
                                                     : 0x1p-1074;
  double sum = 0;
  double product = 1;
  double widest = 1;  // the largest factor that may multiply an underflowed intermediate result
  for (const double value : values) {
    sum += std::abs(value);
    product *= std::abs(value);
    widest *= std::max(1.0, std::abs(value));
  }
  const double whole = op.kind == Kind::prod ? product : sum;
  if ((op.kind == Kind::prod ? widest : sum) > largest / 2) return INFINITY;
  const double steps = static_cast<double>(values.size());
  const double bound = (ulps + 0.5 * steps) * epsilon * whole + smallest * steps * (op.kind == Kind::prod ? widest : 1);
  return op.kind == Kind::avg ? bound / (op.scalar == 0 ? steps : op.scalar) + smallest : bound;
}

/// Returns the index of the first element of `have` that no order of the sum can produce, or -1.
inline std::ptrdiff_t first_outside(DType dtype, ReduceOp op, const std::vector<Bytes>& inputs, double ulps,
                                    const std::byte* have, const Bytes& want, std::size_t from) {
  return with_type(dtype, [&](auto zero) -> std::ptrdiff_t {
    using T = decltype(zero);
    if constexpr (!std::is_integral_v<T>) {
      const auto at = [](const std::byte* bytes, std::size_t i) {
        T raw;
        std::memcpy(&raw, bytes + i * sizeof(T), sizeof(T));
        return static_cast<double>(static_cast<SumOf<T>>(raw));
      };
      for (std::size_t i = 0; i < want.size() / sizeof(T); ++i) {
        std::vector<double> values;
        for (std::size_t r = 0; r < inputs.size(); ++r) {
          const double factor_here = op.kind == ReduceOp::Kind::premul_sum ? factor(static_cast<int>(r)) : 1;
          values.push_back(at(inputs[r].data(), from + i) * factor_here);
        }
        const double x = at(have, i);
        const double y = at(want.data(), i);
        if (std::isnan(x) && std::isnan(y)) continue;
        const double allowed = tolerance<T>(op, values, ulps);
        if (!std::isinf(allowed) && !(std::abs(x - y) <= allowed)) return static_cast<std::ptrdiff_t>(i);
      }
      return -1;
    }
    return first_difference(dtype, have, want.data(), want.size() / sizeof(T));
  });
}

}  // namespace tessera::conformance
