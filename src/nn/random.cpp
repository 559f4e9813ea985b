#include "tessera/nn/random.h"

#include <algorithm>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/nn/random.cpp"
#include "hwy/foreach_target.h"  // includes this file once per instruction set

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::nn::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using Words = hn::CappedTag<std::uint32_t, 16>;
using Floats = hn::Rebind<float, Words>;
using W = hn::Vec<Words>;
using F = hn::Vec<Floats>;
constexpr std::size_t kLanes = hn::MaxLanes(Words());

struct Product {
  W high, low;
};
/// The 64-bit products of each lane with one factor, split into high and low words.
HWY_INLINE Product multiply(W x, W factor) {
  const Words d;
#if HWY_TARGET == HWY_SCALAR
  const std::uint64_t product = std::uint64_t{hn::GetLane(x)} * hn::GetLane(factor);
  return {hn::Set(d, static_cast<std::uint32_t>(product >> 32)), hn::Set(d, static_cast<std::uint32_t>(product))};
#else
  const hn::Repartition<std::uint64_t, Words> u64_lanes;
  const auto even = hn::MulEven(x, factor);
  const auto odd = hn::MulEven(hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(u64_lanes, x))), factor);
  const auto lower = hn::Set(u64_lanes, 0xffffffffu);
  return {hn::BitCast(d, hn::Or(hn::ShiftRight<32>(even), hn::AndNot(lower, odd))),
          hn::BitCast(d, hn::Or(hn::And(lower, even), hn::ShiftLeft<32>(odd)))};
#endif
}

/// One block per lane.
HWY_INLINE void philox(const RandomStream& stream, std::uint64_t first, std::uint32_t* out) {
  // Multipliers and key increments: Salmon et al., table 2 and section 4.3.
  constexpr std::uint32_t kMultiply0 = 0xD2511F53u, kMultiply1 = 0xCD9E8D57u;
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
  const Words d;
  alignas(64) std::uint32_t low[kLanes], high[kLanes];
  for (std::size_t i = 0; i < kLanes; ++i) {
    low[i] = static_cast<std::uint32_t>(first + i);
    high[i] = static_cast<std::uint32_t>((first + i) >> 32);
  }
  W c0 = hn::Load(d, low), c1 = hn::Load(d, high);
  W c2 = hn::Set(d, static_cast<std::uint32_t>(stream.high)),
    c3 = hn::Set(d, static_cast<std::uint32_t>(stream.high >> 32));
  std::uint32_t k0 = stream.key[0], k1 = stream.key[1];
  const W m0 = hn::Set(d, kMultiply0), m1 = hn::Set(d, kMultiply1);
  for (int round = 0; round < 10; ++round) {
    const Product p0 = multiply(c0, m0), p1 = multiply(c2, m1);
    c0 = hn::Xor(hn::Xor(p1.high, c1), hn::Set(d, k0));
    c1 = p1.low;
    c2 = hn::Xor(hn::Xor(p0.high, c3), hn::Set(d, k1));
    c3 = p0.low;
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  hn::StoreInterleaved4(c0, c1, c2, c3, d, out);
}

void blocks(const RandomStream& stream, std::uint64_t first, std::uint64_t count, std::uint32_t* out) {
  std::uint64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) philox(stream, first + i, out + 4 * i);
  if (i < count) {
    alignas(64) std::uint32_t rest[4 * kLanes];
    philox(stream, first + i, rest);
    std::memcpy(out + 4 * i, rest, 4 * (count - i) * sizeof(std::uint32_t));
  }
}

HWY_INLINE F value(float x) { return hn::Set(Floats(), x); }

/// Horner's rule with separate multiply and add, because machines without fused operations would give other bits.
template <std::size_t n>
HWY_INLINE F horner(F x, const float (&c)[n]) {
  F sum = value(c[0]);
  for (std::size_t i = 1; i < n; ++i) sum = hn::Add(hn::Mul(sum, x), value(c[i]));
  return sum;
}

// ln(x) for a positive normal x: x = m 2^e with m in [sqrt(1/2), sqrt(2)), with the polynomial of logf in S. Moshier's
// Cephes.
HWY_INLINE F natural_log(F x) {
  static constexpr float kPolynomial[] = {7.0376836292e-2f,  -1.1514610310e-1f, 1.1676998740e-1f,
                                          -1.2420140846e-1f, 1.4249322787e-1f,  -1.6668057665e-1f,
                                          2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f};
  const hn::RebindToSigned<Floats> integers;
  const auto root = hn::Set(integers, 0x3f3504f3);  // sqrt(1/2)
  const auto shifted = hn::Sub(hn::BitCast(integers, x), root);
  const F exponent = hn::ConvertTo(Floats(), hn::ShiftRight<23>(shifted));
  const auto mantissa = hn::Add(hn::And(shifted, hn::Set(integers, 0x007fffff)), root);
  const F f = hn::Sub(hn::BitCast(Floats(), mantissa), value(1.0f));
  const F z = hn::Mul(f, f);
  F y = hn::Mul(hn::Mul(f, z), horner(f, kPolynomial));
  y = hn::Add(y, hn::Mul(exponent, value(-2.12194440e-4f)));
  y = hn::Sub(y, hn::Mul(value(0.5f), z));
  return hn::Add(hn::Add(f, y), hn::Mul(exponent, value(0.693359375f)));
}

// The upper quantile of v in (0, 1/2] by Wichura's PPND7: one rational function of (1/2 - v)^2 in the middle, one of
// sqrt(-ln v) in the tail (31 bits can't reach the third, for v below exp(-25)). Computes both and selects one.
HWY_INLINE F quantile(F v) {
  static constexpr float kA[] = {5.9109374720e1f, 1.5929113202e2f, 5.0434271938e1f, 3.3871327179e0f};
  static constexpr float kB[] = {6.7187563600e1f, 7.8757757664e1f, 1.7895169469e1f, 1.0f};
  static constexpr float kC[] = {1.7023821103e-1f, 1.3067284816e0f, 2.7568153900e0f, 1.4234372777e0f};
  static constexpr float kD[] = {1.2021132975e-1f, 7.3700164250e-1f, 1.0f};
  const F q = hn::Sub(value(0.5f), v);
  const F r = hn::Sub(value(0.180625f), hn::Mul(q, q));
  const F middle = hn::Div(hn::Mul(q, horner(r, kA)), horner(r, kB));
  const F t = hn::Sub(hn::Sqrt(hn::Neg(natural_log(v))), value(1.6f));
  const F tail = hn::Div(horner(t, kC), horner(t, kD));
  return hn::IfThenElse(hn::Le(q, value(0.425f)), middle, tail);
}

/// The lowest bit of a word is the sign; the other bits determine v.
HWY_INLINE F normal(W word) {
  const hn::RebindToSigned<Floats> integers;
  const F magnitude = hn::ConvertTo(Floats(), hn::BitCast(integers, hn::ShiftRight<1>(word)));
  const F v = hn::Mul(hn::Add(magnitude, value(0.5f)), value(0x1p-32f));
  const auto sign = hn::BitCast(Floats(), hn::ShiftLeft<31>(word));
  return hn::Xor(quantile(v), sign);
}

void normals(const std::uint32_t* words, float* out, std::size_t count) {
  const Words d;
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) hn::StoreU(normal(hn::LoadU(d, words + i)), Floats(), out + i);
  if (i < count) {
    alignas(64) std::uint32_t rest[kLanes] = {};
    alignas(64) float z[kLanes];
    std::memcpy(rest, words + i, (count - i) * sizeof(std::uint32_t));
    hn::Store(normal(hn::Load(d, rest)), Floats(), z);
    std::memcpy(out + i, z, (count - i) * sizeof(float));
  }
}

}  // namespace
}  // namespace tessera::nn::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::nn {
HWY_EXPORT(blocks);
HWY_EXPORT(normals);
namespace {

constexpr std::uint64_t kDropoutDomain = 0x9e3779b97f4a7c15u;  // separates masks from initial values
constexpr std::size_t kChunk = 1024;                           // words generated at a time

constexpr std::uint32_t low(std::uint64_t x) { return static_cast<std::uint32_t>(x); }
constexpr std::uint32_t high(std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); }

/// Words of Philox blocks [first, first + count): out[4 * count].
void philox_blocks(const RandomStream& stream, std::uint64_t first, std::uint64_t count, std::uint32_t* out) {
  HWY_DYNAMIC_DISPATCH(blocks)(stream, first, count, out);
}

template <class Function>
void in_chunks(const StreamRange& range, Function&& function) {
  std::uint32_t words[kChunk];
  for (std::uint64_t at = range.begin; at < range.end;) {
    const std::uint64_t end = std::min<std::uint64_t>(range.end, at + kChunk);
    random_words(range.stream, at, end, words);
    function(static_cast<const std::uint32_t*>(words), at - range.begin, static_cast<std::size_t>(end - at));
    at = end;
  }
}

StreamRange drawn(const RandomRange& range) { return {tensor_stream(range.seed, range.name), range.begin, range.end}; }

template <class T>
void fill_normal_as(const StreamRange& range, T mean, T std, T* out) {
  float z[kChunk];
  in_chunks(range, [&](const std::uint32_t* words, std::uint64_t offset, std::size_t count) {
    normal_from_words(words, z, count);
    for (std::size_t i = 0; i < count; ++i) out[offset + i] = mean + std * static_cast<T>(z[i]);
  });
}

template <class T>
void fill_uniform_as(const StreamRange& range, T from, T to, T* out) {
  in_chunks(range, [&](const std::uint32_t* words, std::uint64_t offset, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i)
      out[offset + i] =
          from + (to - from) * (static_cast<T>(static_cast<std::int32_t>(words[i] >> 8)) * static_cast<T>(0x1p-24));
  });
}

}  // namespace

void normal_from_words(const std::uint32_t* words, float* out, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(normals)(words, out, count);
}

PhiloxCounter philox4x32(PhiloxCounter counter, PhiloxKey key) {
  PhiloxCounter out;
  const RandomStream stream{key, counter[2] | std::uint64_t{counter[3]} << 32};
  philox_blocks(stream, counter[0] | std::uint64_t{counter[1]} << 32, 1, out.data());
  return out;
}

std::uint64_t hash_name(std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) {
    hash ^= static_cast<unsigned char>(c);
    hash *= 0x100000001b3u;
  }
  return hash;
}

RandomStream tensor_stream(std::uint64_t seed, std::string_view name) {
  return {{low(seed), high(seed)}, hash_name(name)};
}

RandomStream dropout_stream(std::uint64_t seed, std::uint64_t step, std::string_view module, std::uint64_t sample) {
  // Philox itself mixes seed, step and module into the key; the sample is the counter's upper half.
  const std::uint64_t name = hash_name(module) ^ kDropoutDomain;
  const PhiloxCounter mixed = philox4x32({low(step), high(step), low(name), high(name)}, {low(seed), high(seed)});
  return {{mixed[0], mixed[1]}, sample};
}

void random_words(const RandomStream& stream, std::uint64_t begin, std::uint64_t end, std::uint32_t* out) {
  if (begin >= end) return;
  // Whole blocks go directly to `out`, partial blocks at the ends through a copy.
  const std::uint64_t first = (begin + 3) / 4, last = end / 4;
  std::uint32_t words[4];
  const auto part = [&](std::uint64_t from, std::uint64_t to) {
    if (from >= to) return;
    philox_blocks(stream, from / 4, 1, words);
    std::copy(words + from % 4, words + from % 4 + (to - from), out + (from - begin));
  };
  part(begin, std::min(end, first * 4));
  if (first < last) philox_blocks(stream, first, last - first, out + (first * 4 - begin));
  part(std::max(first, last) * 4, end);
}

void fill_normal(const RandomRange& range, float mean, float std, float* out) {
  fill_normal_as(drawn(range), mean, std, out);
}
void fill_normal(const RandomRange& range, double mean, double std, double* out) {
  fill_normal_as(drawn(range), mean, std, out);
}
void fill_normal(const StreamRange& range, float mean, float std, float* out) { fill_normal_as(range, mean, std, out); }
void fill_normal(const StreamRange& range, double mean, double std, double* out) {
  fill_normal_as(range, mean, std, out);
}
void fill_uniform(const RandomRange& range, float from, float to, float* out) {
  fill_uniform_as(drawn(range), from, to, out);
}
void fill_uniform(const RandomRange& range, double from, double to, double* out) {
  fill_uniform_as(drawn(range), from, to, out);
}
void fill_uniform(const StreamRange& range, float from, float to, float* out) { fill_uniform_as(range, from, to, out); }
void fill_uniform(const StreamRange& range, double from, double to, double* out) {
  fill_uniform_as(range, from, to, out);
}

}  // namespace tessera::nn
#endif  // HWY_ONCE
