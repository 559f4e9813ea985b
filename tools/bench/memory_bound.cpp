#include "tools/bench/memory_bound.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace tessera::tools {
namespace {

std::size_t rounded_up(std::size_t bytes) {
  return (bytes + base::kAlignment - 1) / base::kAlignment * base::kAlignment;
}

/// The rest of a pass, or all of it without vector instructions.
void combine_words(const CombinePass& pass, std::size_t begin) {
  for (std::size_t at = begin; at < pass.bytes; ++at) {
    auto sum = std::to_integer<unsigned>(pass.from[at]);
    for (int k = 1; k < pass.sources; ++k)
      sum += std::to_integer<unsigned>(pass.from[static_cast<std::size_t>(k) * pass.stride + at]);
    pass.to[at] = static_cast<std::byte>(sum);
  }
}

#if defined(__x86_64__)
constexpr std::size_t kStep = 64;

/// Returns the number of processed bytes.
template <bool kStream>
[[gnu::target("avx2")]] std::size_t combine_avx2(const CombinePass& pass) {
  const std::size_t whole = pass.bytes / kStep * kStep;
  for (std::size_t at = 0; at < whole; at += kStep) {
    __m256i low = _mm256_load_si256(reinterpret_cast<const __m256i*>(pass.from + at));
    __m256i high = _mm256_load_si256(reinterpret_cast<const __m256i*>(pass.from + at + 32));
    for (int k = 1; k < pass.sources; ++k) {
      const std::byte* from = pass.from + static_cast<std::size_t>(k) * pass.stride + at;
      low = _mm256_add_epi32(low, _mm256_load_si256(reinterpret_cast<const __m256i*>(from)));
      high = _mm256_add_epi32(high, _mm256_load_si256(reinterpret_cast<const __m256i*>(from + 32)));
    }
    auto* to = reinterpret_cast<__m256i*>(pass.to + at);
    if constexpr (kStream) {
      _mm256_stream_si256(to, low);
      _mm256_stream_si256(to + 1, high);
    } else {
      _mm256_store_si256(to, low);
      _mm256_store_si256(to + 1, high);
    }
  }
  if constexpr (kStream) _mm_sfence();
  return whole;
}

template <bool kStream>
std::size_t combine_sse2(const CombinePass& pass) {
  const std::size_t whole = pass.bytes / sizeof(__m128i) * sizeof(__m128i);
  for (std::size_t at = 0; at < whole; at += sizeof(__m128i)) {
    __m128i sum = _mm_load_si128(reinterpret_cast<const __m128i*>(pass.from + at));
    for (int k = 1; k < pass.sources; ++k) {
      const std::byte* from = pass.from + static_cast<std::size_t>(k) * pass.stride + at;
      sum = _mm_add_epi32(sum, _mm_load_si128(reinterpret_cast<const __m128i*>(from)));
    }
    auto* to = reinterpret_cast<__m128i*>(pass.to + at);
    if constexpr (kStream)
      _mm_stream_si128(to, sum);
    else
      _mm_store_si128(to, sum);
  }
  if constexpr (kStream) _mm_sfence();
  return whole;
}

template <bool kStream>
std::size_t combine_vectors(const CombinePass& pass) {
  return __builtin_cpu_supports("avx2") != 0 ? combine_avx2<kStream>(pass) : combine_sse2<kStream>(pass);
}
#else
template <bool kStream>
std::size_t combine_vectors(const CombinePass&) {
  return 0;
}
#endif

constexpr std::uintptr_t kLine = 64;  // flushing a longer line twice is harmless

template <class F>
void each_line(std::span<const std::byte> bytes, F&& flush) {
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data());
  for (std::uintptr_t at = begin / kLine * kLine; at < begin + bytes.size(); at += kLine)
    flush(reinterpret_cast<void*>(at));  // NOLINT(performance-no-int-to-ptr)
}

#if defined(__x86_64__)
bool has_clflushopt() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & bit_CLFLUSHOPT) != 0;
}
#endif

}  // namespace

void combine_pass(const CombinePass& pass, Stores stores) {
  combine_words(pass, stores == Stores::non_temporal ? combine_vectors<true>(pass) : combine_vectors<false>(pass));
}

PrivateMemory::PrivateMemory(base::MemoryPool& pool, const MemoryTraffic& largest) {
  const std::size_t to = rounded_up(largest.combined) + rounded_up(largest.copied);
  const std::size_t from =
      rounded_up(largest.combined) * static_cast<std::size_t>(largest.sources) + rounded_up(largest.copied);
  from_ = pool.allocate(from, base::MemoryCategory::other);
  to_ = pool.allocate(to, base::MemoryCategory::other);
  if (from != 0) std::memset(from_.data(), 1, from);  // unwritten memory is one cached page of zeros
  if (to != 0) std::memset(to_.data(), 1, to);
}

void PrivateMemory::run(const MemoryTraffic& traffic, Stores stores) const {
  const std::size_t chunk = rounded_up(traffic.combined);
  if (traffic.combined != 0)
    combine_pass({from_.bytes_at(0), chunk, traffic.sources, to_.bytes_at(0), traffic.combined}, stores);
  if (traffic.copied == 0) return;
  const std::byte* from = from_.bytes_at(chunk * static_cast<std::size_t>(traffic.sources));
  std::byte* to = to_.bytes_at(chunk);
  if (stores == Stores::plain) {
    std::memcpy(to, from, traffic.copied);
  } else {
    combine_pass({from, 0, 1, to, traffic.copied}, stores);
  }
}

void PrivateMemory::evict(const MemoryTraffic& traffic) const {
  const std::size_t chunk = rounded_up(traffic.combined);
  tools::evict({from_.bytes_at(0), chunk * static_cast<std::size_t>(traffic.sources) + traffic.copied});
  tools::evict({to_.bytes_at(0), chunk + traffic.copied});
}

#if defined(__x86_64__)
bool can_evict() { return true; }

void evict(std::span<const std::byte> bytes) {
  static const bool unordered = has_clflushopt();
  if (unordered)  // like clflush, but the lines need not wait for each other: ten times faster
    each_line(bytes, [](void* line) { asm volatile("clflushopt %0" : "+m"(*static_cast<char*>(line))); });
  else
    each_line(bytes, [](void* line) { _mm_clflush(line); });
  _mm_mfence();
}
#elif defined(__aarch64__)
bool can_evict() { return true; }

void evict(std::span<const std::byte> bytes) {
  each_line(bytes, [](void* line) { asm volatile("dc civac, %0" ::"r"(line) : "memory"); });
  asm volatile("dsb ish" ::: "memory");
}
#else
bool can_evict() { return false; }
void evict(std::span<const std::byte>) {}
#endif

}  // namespace tessera::tools
