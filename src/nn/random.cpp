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

// With v in (0, 1/2] the probability beyond the sought quantile: x = 1 - 2v, w = -ln(1 - x^2) = -ln(4 v (1 - v)), and
// sqrt(2) erfinv(x) = sqrt(2) x p(w). Both ranges of w are computed and one chosen, so that the loop has no branch.
float normal_from_word(std::uint32_t word) {
  const std::uint32_t magnitude = word >> 1;  // the lowest bit is the sign
  const float v = (static_cast<float>(static_cast<std::int32_t>(magnitude)) + 0.5f) * 0x1p-32f;
  const float w = -natural_log(4.0f * v * (1.0f - v));
  const float a = w - 2.5f;
  float near = 2.81022636e-08f;
  near = near * a + 3.43273939e-07f;
  near = near * a - 3.5233877e-06f;
  near = near * a - 4.39150654e-06f;
  near = near * a + 0.00021858087f;
  near = near * a - 0.00125372503f;
  near = near * a - 0.00417768164f;
  near = near * a + 0.246640727f;
  near = near * a + 1.50140941f;
  const float b = std::sqrt(w > 5.0f ? w : 5.0f) - 3.0f;
  float far = -0.000200214257f;
  far = far * b + 0.000100950558f;
  far = far * b + 0.00134934322f;
  far = far * b - 0.00367342844f;
  far = far * b + 0.00573950773f;
  far = far * b - 0.0076224613f;
  far = far * b + 0.00943887047f;
  far = far * b + 1.00167406f;
  far = far * b + 2.83297682f;
  const float z = 1.41421356237f * (1.0f - 2.0f * v) * (w < 5.0f ? near : far);
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
