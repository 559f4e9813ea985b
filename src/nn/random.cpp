#include "tessera/nn/random.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace tessera::nn {
namespace {

constexpr std::uint64_t kDropoutDomain = 0x9e3779b97f4a7c15u;  // keeps masks apart from initial values
constexpr std::size_t kChunk = 1024;                           // words drawn at a time

// Philox4x32's multipliers and key increments (Salmon et al., table 2 and section 4.3).
constexpr std::uint32_t kMultiply0 = 0xD2511F53u, kMultiply1 = 0xCD9E8D57u;
constexpr std::uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;

PhiloxCounter rounds(PhiloxCounter c, PhiloxKey k) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{kMultiply0} * c[0];
    const std::uint64_t p1 = std::uint64_t{kMultiply1} * c[2];
    c = {static_cast<std::uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<std::uint32_t>(p1),
         static_cast<std::uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<std::uint32_t>(p0)};
    k[0] += kWeyl0;
    k[1] += kWeyl1;
  }
  return c;
}

constexpr std::uint32_t low(std::uint64_t x) { return static_cast<std::uint32_t>(x); }
constexpr std::uint32_t high(std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); }

PhiloxCounter block(const RandomStream& stream, std::uint64_t index) {
  return rounds({low(index), high(index), low(stream.high), high(stream.high)}, stream.key);
}

// ln(x) for a positive normal x: x = m 2^e with m in [sqrt(1/2), sqrt(2)), the polynomial of S. Moshier's Cephes, logf.
float natural_log(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t shifted = bits - 0x3f3504f3u;  // sqrt(1/2)
  const auto exponent = static_cast<float>(static_cast<std::int32_t>(shifted) >> 23);
  const float f = std::bit_cast<float>((shifted & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  const float z = f * f;
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  float y = f * z * p;
  y = y + exponent * -2.12194440e-4f;
  y = y - 0.5f * z;
  return (f + y) + exponent * 0.693359375f;
}

// The upper quantile of v in (0, 1/2] by Wichura's PPND7: one rational function of (1/2 - v)^2 in the middle, one of
// sqrt(-ln v) in the tail (his third, for v below exp(-25), can't be reached by 31 bits). Both are computed and one
// chosen, so that the loop has no branch.
float normal_from_word(std::uint32_t word) {
  const std::uint32_t magnitude = word >> 1;  // the lowest bit is the sign
  const float v = (static_cast<float>(static_cast<std::int32_t>(magnitude)) + 0.5f) * 0x1p-32f;
  const float q = 0.5f - v;
  const float r = 0.180625f - q * q;
  const float middle = q * (((5.9109374720e1f * r + 1.5929113202e2f) * r + 5.0434271938e1f) * r + 3.3871327179e0f) /
                       (((6.7187563600e1f * r + 7.8757757664e1f) * r + 1.7895169469e1f) * r + 1.0f);
  const float t = std::sqrt(-natural_log(v)) - 1.6f;
  const float tail = (((1.7023821103e-1f * t + 1.3067284816e0f) * t + 2.7568153900e0f) * t + 1.4234372777e0f) /
                     ((1.2021132975e-1f * t + 7.3700164250e-1f) * t + 1.0f);
  const float z = q <= 0.425f ? middle : tail;
  return (word & 1u) ? -z : z;
}

template <class Function>
void in_chunks(const RandomRange& range, Function&& function) {
  const RandomStream stream = tensor_stream(range.seed, range.name);
  std::uint32_t words[kChunk];
  for (std::uint64_t at = range.begin; at < range.end;) {
    const std::uint64_t end = std::min<std::uint64_t>(range.end, at + kChunk);
    random_words(stream, at, end, words);
    function(static_cast<const std::uint32_t*>(words), at - range.begin, static_cast<std::size_t>(end - at));
    at = end;
  }
}

template <class T>
void fill_normal_as(const RandomRange& range, T mean, T std, T* out) {
  float z[kChunk];
  in_chunks(range, [&](const std::uint32_t* words, std::uint64_t offset, std::size_t count) {
    normal_from_words(words, z, count);
    for (std::size_t i = 0; i < count; ++i) out[offset + i] = mean + std * static_cast<T>(z[i]);
  });
}

template <class T>
void fill_uniform_as(const RandomRange& range, T from, T to, T* out) {
  in_chunks(range, [&](const std::uint32_t* words, std::uint64_t offset, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i)
      out[offset + i] = from + (to - from) * (static_cast<T>(static_cast<std::int32_t>(words[i] >> 8)) * static_cast<T>(0x1p-24));
  });
}

}  // namespace

PhiloxCounter philox4x32(PhiloxCounter counter, PhiloxKey key) { return rounds(counter, key); }

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
  // Seed, step and module are folded into the key by Philox itself; the sample is the counter's upper half.
  const std::uint64_t name = hash_name(module) ^ kDropoutDomain;
  const PhiloxCounter mixed = rounds({low(step), high(step), low(name), high(name)}, {low(seed), high(seed)});
  return {{mixed[0], mixed[1]}, sample};
}

void random_words(const RandomStream& stream, std::uint64_t begin, std::uint64_t end, std::uint32_t* out) {
  std::uint64_t at = begin;
  while (at < end) {
    const PhiloxCounter words = block(stream, at / 4);
    if (at % 4 == 0 && end - at >= 4) {
      std::copy(words.begin(), words.end(), out);
      out += 4;
      at += 4;
    } else {
      const std::uint64_t stop = std::min<std::uint64_t>(end, (at / 4 + 1) * 4);
      for (; at < stop; ++at) *out++ = words[at % 4];
    }
  }
}

void normal_from_words(const std::uint32_t* words, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = normal_from_word(words[i]);
}

void fill_normal(const RandomRange& range, float mean, float std, float* out) { fill_normal_as(range, mean, std, out); }
void fill_normal(const RandomRange& range, double mean, double std, double* out) { fill_normal_as(range, mean, std, out); }
void fill_uniform(const RandomRange& range, float from, float to, float* out) { fill_uniform_as(range, from, to, out); }
void fill_uniform(const RandomRange& range, double from, double to, double* out) { fill_uniform_as(range, from, to, out); }

}  // namespace tessera::nn
