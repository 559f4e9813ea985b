// One element of a sum in the order of the tree: the arithmetic of the deterministic mode, with the bits of the host's
// reduce_tree. Plain C++ that the CUDA compiler and the host's read alike, so that a test holds it against reduce_tree
// on any machine. No contraction: where it is compiled, multiply-adds must not be fused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "tessera/base/dtype.h"
#include "tessera/comm/types.h"

#ifdef __CUDACC__
#define TESSERA_NCCL_HD __host__ __device__
#else
#define TESSERA_NCCL_HD
#endif

namespace tessera::nccl {

/// Where the pieces of an element's slice are: rank k's at `pieces` + k * stride, but for the own one.
struct TreeWork {
  comm::ReduceOp op;
  base::DType dtype;
  int ranks;
  int own;
  const void* own_piece;
  const void* pieces;
  std::size_t stride;     ///< bytes
  const double* factors;  ///< premul_sum: one for each rank, on the device
  void* out;              ///< may be own_piece
  std::size_t count;
};

/// How an element is added, and how it gets there and back.
template <class T>
struct TreeNumber {
  using Sum = T;
  TESSERA_NCCL_HD static Sum load(T x) { return x; }
  TESSERA_NCCL_HD static T store(Sum x) { return x; }
};

template <>
struct TreeNumber<base::bf16> {
  using Sum = float;
  TESSERA_NCCL_HD static Sum load(base::bf16 x) {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(x.bits) << 16);
  }
  TESSERA_NCCL_HD static base::bf16 store(Sum value) {
    const auto x = __builtin_bit_cast(std::uint32_t, value);
    base::bf16 made;
    made.bits = static_cast<std::uint16_t>((x & 0x7fffffffU) > 0x7f800000U ? (x >> 16) | 0x40U
                                                                           : (x + 0x7fffU + ((x >> 16) & 1U)) >> 16);
    return made;
  }
};

template <>
struct TreeNumber<base::f16> {
  using Sum = float;
  TESSERA_NCCL_HD static Sum load(base::f16 x) {
    const std::uint32_t magnitude = static_cast<std::uint32_t>(x.bits & 0x7fffU) << 13;
    // The exponent's bias differs by 112; the product renormalises subnormals exactly.
    const auto scaled = __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(float, magnitude) * 0x1p112F);
    const std::uint32_t special = magnitude >= 0x0f800000U ? 0x7f800000U : 0U;
    return __builtin_bit_cast(float, scaled | special | (static_cast<std::uint32_t>(x.bits & 0x8000U) << 16));
  }
  TESSERA_NCCL_HD static base::f16 store(Sum value) {
    const auto x = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t magnitude = x & 0x7fffffffU;
    std::uint32_t half = 0;
    if (magnitude > 0x7f800000U) {
      half = 0x7e00U | ((magnitude >> 13) & 0x3ffU);
    } else if (magnitude >= 0x477ff000U) {
      half = 0x7c00U;
    } else if (magnitude < 0x38800000U) {  // the addition itself rounds a subnormal
      half = __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(float, magnitude) + 0.5F) - 0x3f000000U;
    } else {
      half = (magnitude + 0xfffU + ((magnitude >> 13) & 1U) - 0x38000000U) >> 13;
    }
    base::f16 made;
    made.bits = static_cast<std::uint16_t>(((x >> 16) & 0x8000U) | half);
    return made;
  }
};

template <class S>
TESSERA_NCCL_HD S tree_combine(comm::ReduceOp::Kind kind, S a, S b) {
  using Kind = comm::ReduceOp::Kind;
  if constexpr (std::is_floating_point_v<S>) {
    if (kind == Kind::prod) return a * b;
    if (kind == Kind::min) return a != a ? a : (b != b ? b : (a < b ? a : b));
    if (kind == Kind::max) return a != a ? a : (b != b ? b : (a > b ? a : b));
    return a + b;
  } else {  // wraps: 64 bits hold what a promotion to int might overflow
    using U = std::make_unsigned_t<S>;
    if (kind == Kind::prod)
      return static_cast<S>(static_cast<U>(static_cast<std::uint64_t>(static_cast<U>(a)) * static_cast<U>(b)));
    if (kind == Kind::min) return a < b ? a : b;
    if (kind == Kind::max) return a > b ? a : b;
    return static_cast<S>(static_cast<U>(static_cast<std::uint64_t>(static_cast<U>(a)) + static_cast<U>(b)));
  }
}

template <class S>
TESSERA_NCCL_HD S tree_scalar(double value) {
  if constexpr (std::is_floating_point_v<S>) {
    return static_cast<S>(value);
  } else {
    return static_cast<S>(static_cast<std::int64_t>(value));
  }
}

template <class T>
TESSERA_NCCL_HD typename TreeNumber<T>::Sum tree_leaf(const TreeWork& work, int rank, std::size_t i) {
  using S = typename TreeNumber<T>::Sum;
  const void* const piece =
      rank == work.own ? work.own_piece
                       : static_cast<const unsigned char*>(work.pieces) + static_cast<std::size_t>(rank) * work.stride;
  const S x = TreeNumber<T>::load(static_cast<const T*>(piece)[i]);
  if (work.op.kind != comm::ReduceOp::Kind::premul_sum) return x;
  return tree_combine(comm::ReduceOp::Kind::prod, x, tree_scalar<S>(work.factors[rank]));
}

/// sum(a..b) = sum(a..m) + sum(m..b).
template <class T>
TESSERA_NCCL_HD typename TreeNumber<T>::Sum tree_sum(const TreeWork& work, int a, int b, std::size_t i) {
  if (b - a == 1) return tree_leaf<T>(work, a, i);
  const int m = a + (b - a) / 2;
  const auto left = tree_sum<T>(work, a, m, i);
  return tree_combine(work.op.kind, left, tree_sum<T>(work, m, b, i));
}

template <class T>
TESSERA_NCCL_HD void tree_element(const TreeWork& work, std::size_t i) {
  using S = typename TreeNumber<T>::Sum;
  S sum = tree_sum<T>(work, 0, work.ranks, i);
  if (work.op.kind == comm::ReduceOp::Kind::avg) sum = static_cast<S>(sum / tree_scalar<S>(work.op.scalar));
  static_cast<T*>(work.out)[i] = TreeNumber<T>::store(sum);
}

/// Calls `f` with an element of the dtype's type.
template <class F>
void with_element(base::DType dtype, F&& f) {
  switch (dtype) {
    case base::DType::f32:
      return f(float{});
    case base::DType::f64:
      return f(double{});
    case base::DType::f16:
      return f(base::f16{});
    case base::DType::bf16:
      return f(base::bf16{});
    case base::DType::i8:
      return f(std::int8_t{});
    case base::DType::u8:
      return f(std::uint8_t{});
    case base::DType::i32:
      return f(std::int32_t{});
    case base::DType::i64:
      return f(std::int64_t{});
    case base::DType::u32:
      return f(std::uint32_t{});
    case base::DType::u64:
      return f(std::uint64_t{});
  }
}

}  // namespace tessera::nccl
