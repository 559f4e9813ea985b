#include "tessera/nn/random.h"

#include <algorithm>

#include "tessera/nn/kernels/cpu/random_blocks.h"

namespace tessera::nn {
namespace {

constexpr std::uint64_t kDropoutDomain = 0x9e3779b97f4a7c15u;  // separates masks from initial values
constexpr std::size_t kChunk = 1024;                           // words generated at a time

constexpr std::uint32_t low(std::uint64_t x) { return static_cast<std::uint32_t>(x); }
constexpr std::uint32_t high(std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); }

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
