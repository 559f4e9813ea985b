// Common vector code of the kernels; included once per instruction set (see hwy/foreach_target.h).
//
// Two rules make results independent of position and vector width. Element-wise code processes the tail in a padded
// copy of one vector, so the same instructions compute every element. Sums keep kSumLanes partial sums for every vector
// width, element i in lane i % kSumLanes, and combine them in one tree.
#if defined(TESSERA_NN_KERNELS_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_NN_KERNELS_SIMD_INL_H_
#undef TESSERA_NN_KERNELS_SIMD_INL_H_
#else
#define TESSERA_NN_KERNELS_SIMD_INL_H_
#endif

#include <cmath>
#include <cstddef>
#include <cstring>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::nn::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class T>
using Tag = hn::CappedTag<T, 16>;
template <class T>
using Vec = hn::Vec<Tag<T>>;
template <class T>
inline constexpr std::size_t kLanes = hn::MaxLanes(Tag<T>());

/// Lanes of a sum.
inline constexpr std::size_t kSumLanes = 32;

template <class T>
HWY_INLINE Vec<T> set(double value) {
  return hn::Set(Tag<T>(), static_cast<T>(value));
}

template <class T>
HWY_INLINE Vec<T> load(const T* from) {
  return hn::LoadU(Tag<T>(), from);
}

/// Loads the first `count` lanes from memory; the others are zero.
template <class T>
HWY_INLINE Vec<T> load_part(const T* from, std::size_t count) {
  alignas(64) T padded[kLanes<T>] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return hn::Load(Tag<T>(), padded);
}

template <class T>
HWY_INLINE void store(Vec<T> value, T* to) {
  hn::StoreU(value, Tag<T>(), to);
}

template <class T>
HWY_INLINE void store_part(Vec<T> value, T* to, std::size_t count) {
  alignas(64) T padded[kLanes<T>];
  hn::Store(value, Tag<T>(), padded);
  std::memcpy(to, padded, count * sizeof(T));
}

/// a * b + c, rounded once on every processor: one without the instruction computes it by the standard library, slowly.
template <class T>
HWY_INLINE Vec<T> mul_add(Vec<T> a, Vec<T> b, Vec<T> c) {
#if HWY_NATIVE_FMA
  return hn::MulAdd(a, b, c);
#else
  alignas(64) T x[kLanes<T>], y[kLanes<T>], z[kLanes<T>];
  hn::Store(a, Tag<T>(), x);
  hn::Store(b, Tag<T>(), y);
  hn::Store(c, Tag<T>(), z);
  for (std::size_t i = 0; i < kLanes<T>; ++i) z[i] = std::fma(x[i], y[i], z[i]);
  return hn::Load(Tag<T>(), z);
#endif
}

/// c - a * b, as mul_add().
template <class T>
HWY_INLINE Vec<T> neg_mul_add(Vec<T> a, Vec<T> b, Vec<T> c) {
#if HWY_NATIVE_FMA
  return hn::NegMulAdd(a, b, c);
#else
  return mul_add<T>(hn::Neg(a), b, c);
#endif
}

/// The smaller and the larger of a and b; b if one of them is NaN. Highway's Min and Max do so on x86; elsewhere they
/// return the number.
template <class T>
HWY_INLINE Vec<T> min_of(Vec<T> a, Vec<T> b) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  return hn::Min(a, b);
#else
  return hn::IfThenElse(hn::Lt(a, b), a, b);
#endif
}
template <class T>
HWY_INLINE Vec<T> max_of(Vec<T> a, Vec<T> b) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  return hn::Max(a, b);
#else
  return hn::IfThenElse(hn::Gt(a, b), a, b);
#endif
}

/// out[i] = function(in[i]...) for i < count; out may be an input.
template <class T, class Function, class... In>
HWY_INLINE void map(T* out, std::size_t count, Function function, const In*... in) {
  std::size_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) store<T>(function(load<T>(in + i)...), out + i);
  if (i < count) store_part<T>(function(load_part<T>(in + i, count - i)...), out + i, count - i);
}

/// Like map, or out[i] = out[i] + function(in[i]...) if `accumulate`.
template <class T, class Function, class... In>
HWY_INLINE void map_into(bool accumulate, T* out, std::size_t count, Function function, const In*... in) {
  if (accumulate) {
    map<T>(
        out, count, [&](Vec<T> old, auto... v) HWY_ATTR { return hn::Add(old, function(v...)); },
        static_cast<const T*>(out), in...);
  } else {
    map<T>(out, count, function, in...);
  }
}

/// One vector of a flat range, or its padded tail.
template <class T>
struct Slot {
  std::size_t at, count;
  HWY_INLINE Vec<T> read(const T* from) const {
    return count == kLanes<T> ? load<T>(from + at) : load_part<T>(from + at, count);
  }
  HWY_INLINE void write(Vec<T> value, T* to) const {
    if (count == kLanes<T>)
      store<T>(value, to + at);
    else
      store_part<T>(value, to + at, count);
  }
};

template <class T, class Body>
HWY_INLINE void for_slots(std::size_t count, Body body) {
  std::size_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) body(Slot<T>{i, kLanes<T>});
  if (i < count) body(Slot<T>{i, count - i});
}

/// The partial sums of one reduction.
template <class T>
struct Sum {
  static constexpr std::size_t kParts = kSumLanes / kLanes<T>;
  Vec<T> part[kParts];

  HWY_INLINE Sum() {
    for (std::size_t p = 0; p < kParts; ++p) part[p] = hn::Zero(Tag<T>());
  }
  HWY_INLINE T total() const {
    alignas(64) T lane[kSumLanes];
    for (std::size_t p = 0; p < kParts; ++p) hn::Store(part[p], Tag<T>(), lane + p * kLanes<T>);
    for (std::size_t half = kSumLanes / 2; half > 0; half /= 2)
      for (std::size_t i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
  }
  /// NaN if a lane is NaN.
  HWY_INLINE T largest() const {
    alignas(64) T lane[kSumLanes];
    for (std::size_t p = 0; p < kParts; ++p) hn::Store(part[p], Tag<T>(), lane + p * kLanes<T>);
    T most = lane[0];
    for (const T value : lane) most = value > most || value != value ? value : most;
    return most;
  }
};

/// Calls step(lanes p, vectors...) for the inputs in groups of kSumLanes; the last group is padded with zeros.
template <class T, class Step, class... In>
HWY_INLINE void reduce(std::size_t count, Step step, const In*... in) {
  constexpr std::size_t kParts = kSumLanes / kLanes<T>;
  std::size_t i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes)
    for (std::size_t p = 0; p < kParts; ++p) step(p, load<T>(in + i + p * kLanes<T>)...);
  for (std::size_t p = 0; i < count; ++p, i += kLanes<T>) {
    const std::size_t left = count - i;
    if (left >= kLanes<T>)
      step(p, load<T>(in + i)...);
    else
      step(p, load_part<T>(in + i, left)...);
  }
}

}  // namespace tessera::nn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per target
