// The loops of reduce_tree and copy_bytes, compiled once per instruction set (see reduce.cpp).
#if defined(TESSERA_COMM_REDUCE_KERNELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_COMM_REDUCE_KERNELS_INL_H_
#undef TESSERA_COMM_REDUCE_KERNELS_INL_H_
#else
#define TESSERA_COMM_REDUCE_KERNELS_INL_H_
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "tessera/base/vectorize-inl.h"
#include "tessera/comm/kernels/reduce.h"
#include "tessera/comm/kernels/reduce_element-inl.h"
#include "tessera/comm/slices.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::comm::HWY_NAMESPACE {

using Kind = ReduceOp::Kind;

template <Kind kKind, class S>
inline S combine(S a, S b) {
  if constexpr (std::is_floating_point_v<S>) {
    if constexpr (kKind == Kind::prod) return a * b;
    if constexpr (kKind == Kind::min) return a != a ? a : (b != b ? b : (a < b ? a : b));
    if constexpr (kKind == Kind::max) return a != a ? a : (b != b ? b : (a > b ? a : b));
    return a + b;
  } else {
    using U = std::make_unsigned_t<S>;
    // Signed integers wrap, so they are added as unsigned. Small types would be promoted to int, in which the product
    // of two u16 may overflow; 64 bits hold all products.
    if constexpr (kKind == Kind::prod)
      return static_cast<S>(static_cast<U>(static_cast<std::uint64_t>(static_cast<U>(a)) * static_cast<U>(b)));
    if constexpr (kKind == Kind::min) return a < b ? a : b;
    if constexpr (kKind == Kind::max) return a > b ? a : b;
    if constexpr (kKind == Kind::bit_and) return static_cast<S>(static_cast<U>(a) & static_cast<U>(b));
    if constexpr (kKind == Kind::bit_or) return static_cast<S>(static_cast<U>(a) | static_cast<U>(b));
    if constexpr (kKind == Kind::bit_xor) return static_cast<S>(static_cast<U>(a) ^ static_cast<U>(b));
    return static_cast<S>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  }
}

template <Kind kKind, class T, std::size_t kA, std::size_t kB>
inline typename SumNumber<T>::Sum tree(const T* const* in, const typename SumNumber<T>::Sum* factors, std::size_t i) {
  using S = typename SumNumber<T>::Sum;
  if constexpr (kB - kA == 1) {
    const S x = SumNumber<T>::load(in[kA][i]);
    if constexpr (kKind == Kind::premul_sum) return combine<Kind::prod, S>(x, factors[kA]);
    return x;
  } else {
    constexpr std::size_t kM = tree_middle(kA, kB);
    return combine<kKind, S>(tree<kKind, T, kA, kM>(in, factors, i), tree<kKind, T, kM, kB>(in, factors, i));
  }
}

/// Stores that bypass the caches; a fence must follow. `out` begins on a cache line.
HWY_INLINE void stream_lines(void* out, const void* in, std::size_t bytes) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::CappedTag<std::uint8_t, kStreamLine> d;
  auto* to = static_cast<std::uint8_t*>(out);
  const auto* from = static_cast<const std::uint8_t*>(in);
  const std::size_t lines = bytes / kStreamLine * kStreamLine;
  for (std::size_t line = 0; line < lines; line += kStreamLine)
    for (std::size_t i = line; i < line + kStreamLine; i += hn::Lanes(d)) hn::Stream(hn::LoadU(d, from + i), d, to + i);
  std::memcpy(to + lines, from + lines, bytes - lines);
}

/// The divisor of an average. One of integers may be larger than any of them.
template <class S>
struct Divisor {
  explicit Divisor(double scalar) : value(sum_scalar<S>(scalar)) {
    if constexpr (std::is_integral_v<S>) {
      wide = static_cast<std::int64_t>(scalar);
      fits = value > 0 && static_cast<std::int64_t>(value) == wide;
    }
  }
  S value;
  std::int64_t wide = 0;
  bool fits = true;
};

/// Finishes the tree's result over all sources.
template <Kind kKind, class T>
inline T finish(typename SumNumber<T>::Sum sum, [[maybe_unused]] const Divisor<typename SumNumber<T>::Sum>& divisor) {
  using S = typename SumNumber<T>::Sum;
  if constexpr (kKind == Kind::avg && std::is_integral_v<S>)
    sum = divisor.fits ? static_cast<S>(sum / divisor.value)
                       : static_cast<S>(static_cast<std::int64_t>(sum) / divisor.wide);
  else if constexpr (kKind == Kind::avg)
    sum = static_cast<S>(sum / divisor.value);
  return SumNumber<T>::store(sum);
}

constexpr std::size_t kFew = 4;  ///< sources that one pass adds

/// Training spends its time on floating-point sums. They have specialized loops for up to kFew sources; each takes a
/// second to compile, so all others use the blocks of Reducer, two sources at a time.
template <Kind kKind, class T>
constexpr bool kHot = std::is_floating_point_v<typename SumNumber<T>::Sum> &&
                      (kKind == Kind::sum || kKind == Kind::avg || kKind == Kind::premul_sum);

/// kN sources in one pass, one line of `out` at a time: alternating loads and stores use memory better than a block of
/// one and then of the other. `out` may be one of the sources, since each element depends only on the same element of
/// the sources.
template <Kind kKind, class T, std::size_t kN>
void add_few(const ReduceTask& work, const typename SumNumber<T>::Sum* factors) {
  using S = typename SumNumber<T>::Sum;
  constexpr std::size_t kLine = kStreamLine / sizeof(T);
  const T* in[kN];
  for (std::size_t k = 0; k < kN; ++k) in[k] = static_cast<const T*>(work.sources[k]);
  S by[kN] = {};
  if constexpr (kKind == Kind::premul_sum)
    for (std::size_t k = 0; k < kN; ++k) by[k] = factors[k];
  const Divisor<S> divisor(kKind == Kind::avg ? work.op.scalar : 1);
  T* out = static_cast<T*>(work.out);
  const std::size_t count = work.count;  // copies: the compiler can't know that `out` doesn't overlap `work`
  const std::size_t whole = count / kLine * kLine;
  const auto line_at = [&](std::size_t i, T* line) {
    for (std::size_t e = 0; e < kLine; ++e) line[e] = finish<kKind, T>(tree<kKind, T, 0, kN>(in, by, i + e), divisor);
  };
  if (work.streaming) {
    for (std::size_t i = 0; i < whole; i += kLine) {
      alignas(kStreamLine) T line[kLine];
      line_at(i, line);
      stream_lines(out + i, line, sizeof(line));
    }
  } else {
    for (std::size_t i = 0; i < whole; i += kLine) {
      alignas(kStreamLine) T line[kLine];
      line_at(i, line);
      std::memcpy(out + i, line, sizeof(line));
    }
  }
  for (std::size_t i = whole; i < count; ++i) out[i] = finish<kKind, T>(tree<kKind, T, 0, kN>(in, by, i), divisor);
}

constexpr std::size_t kBlock = 1024;  // elements: two or three blocks stay in the first-level cache

/// The tree over kN sources of a block.
template <Kind kKind, class T, std::size_t kN>
void fused(const T* const* in, const typename SumNumber<T>::Sum* factors, typename SumNumber<T>::Sum* out,
           std::size_t count) {
  const T* local[kN];
  typename SumNumber<T>::Sum by[kN] = {};
  for (std::size_t k = 0; k < kN; ++k) local[k] = in[k];
  if constexpr (kKind == Kind::premul_sum)
    for (std::size_t k = 0; k < kN; ++k) by[k] = factors[k];
  TESSERA_INDEPENDENT_ITERATIONS
  for (std::size_t i = 0; i < count; ++i) out[i] = tree<kKind, T, 0, kN>(local, by, i);
}

template <Kind kKind, class T>
struct Reducer {
  using S = typename SumNumber<T>::Sum;
  const void* const* sources;
  const S* factors;
  std::size_t start;

  /// The tree over sources a .. b of one block, into `out`.
  void range(std::size_t a, std::size_t b, S* out, std::size_t count) const {
    const T* in[kFew];
    const std::size_t n = b - a;
    for (std::size_t k = 0; k < n && k < kFew; ++k) in[k] = static_cast<const T*>(sources[a + k]) + start;
    const S* by = factors == nullptr ? nullptr : factors + a;
    if (n == 1) return fused<kKind, T, 1>(in, by, out, count);
    if (n == 2) return fused<kKind, T, 2>(in, by, out, count);
    if constexpr (kHot<kKind, T>) {
      if (n == 3) return fused<kKind, T, 3>(in, by, out, count);
      if (n == 4) return fused<kKind, T, 4>(in, by, out, count);
    }
    S right[kBlock];
    const std::size_t m = tree_middle(a, b);
    range(a, m, out, count);
    range(m, b, right, count);
    for (std::size_t i = 0; i < count; ++i) out[i] = combine<kKind, S>(out[i], right[i]);
  }
};

template <Kind kKind, class T>
void combine_typed(const ReduceTask& work) {
  using S = typename SumNumber<T>::Sum;
  constexpr std::size_t kMax = kMaxRanks;
  S factors[kKind == Kind::premul_sum ? kMax : 1];
  factors[0] = S{1};
  if constexpr (kKind == Kind::premul_sum)
    for (std::size_t k = 0; k < work.sources.size(); ++k) factors[k] = sum_scalar<S>(work.factors[k]);
  if constexpr (kHot<kKind, T>) {
    if (work.sources.size() == 2) return add_few<kKind, T, 2>(work, factors);
    if (work.sources.size() == 3) return add_few<kKind, T, 3>(work, factors);
    if (work.sources.size() == 4) return add_few<kKind, T, 4>(work, factors);
  }
  T* out = static_cast<T*>(work.out);
  const Divisor<S> divisor(kKind == Kind::avg ? work.op.scalar : 1);
  for (std::size_t start = 0; start < work.count; start += kBlock) {
    const std::size_t count = work.count - start < kBlock ? work.count - start : kBlock;
    const Reducer<kKind, T> reducer{work.sources.data(), kKind == Kind::premul_sum ? factors : nullptr, start};
    S sum[kBlock];  // not in `out`, which may be a source still to be read
    reducer.range(0, work.sources.size(), sum, count);
    alignas(kStreamLine) T made[kBlock];
    T* to = work.streaming ? made : out + start;
    for (std::size_t i = 0; i < count; ++i) to[i] = finish<kKind, T>(sum[i], divisor);
    if (work.streaming) stream_lines(out + start, made, count * sizeof(T));
  }
}

/// The types in which reduce.cpp computes with bits.
template <class T>
constexpr bool kHasBits = std::is_unsigned_v<T> || std::is_same_v<T, std::int16_t>;

/// Reduces if the task is of this kind.
template <Kind kKind, class T>
bool combine_if(const ReduceTask& work) {
  if (work.op.kind != kKind) return false;
  if constexpr (kKind < Kind::bit_and || kHasBits<T>) combine_typed<kKind, T>(work);
  return true;
}

template <class T, std::size_t... kKinds>
void combine_kinds(const ReduceTask& work, std::index_sequence<kKinds...> /*all*/) {
  static_cast<void>((combine_if<static_cast<Kind>(kKinds), T>(work) || ...));
}

void combine_all(const ReduceTask& work) {
  base::with_dtype(work.dtype, [&](auto zero) HWY_ATTR {
    if constexpr (!std::is_same_v<decltype(zero), bool>)
      combine_kinds<decltype(zero)>(work, std::make_index_sequence<kReduceKinds>{});
  });
  if (work.streaming) hwy::FlushStream();
}

void stream_copy(std::uint8_t* out, const std::uint8_t* in, std::size_t bytes) {
  const std::size_t head = (kStreamLine - reinterpret_cast<std::uintptr_t>(out) % kStreamLine) % kStreamLine;
  std::memcpy(out, in, head);
  stream_lines(out + head, in + head, bytes - head);
  hwy::FlushStream();
}

}  // namespace tessera::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
