#include "tessera/nn/kernels/cpu/random_blocks.h"

#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/nn/kernels/cpu/random_blocks.cpp"
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

void philox_blocks(const RandomStream& stream, std::uint64_t first, std::uint64_t count, std::uint32_t* out) {
  HWY_DYNAMIC_DISPATCH(blocks)(stream, first, count, out);
}
void normal_from_words(const std::uint32_t* words, float* out, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(normals)(words, out, count);
}

}  // namespace tessera::nn
#endif  // HWY_ONCE
