#include "tools/bench/cold.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace tessera::tools {
namespace {

constexpr std::uintptr_t kLine = 64;  // flushing a longer line twice is harmless

template <class F>
void each_line(std::span<const std::byte> bytes, F&& flush) {
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data());
  for (std::uintptr_t at = begin / kLine * kLine; at < begin + bytes.size(); at += kLine)
    flush(reinterpret_cast<void*>(at));  // NOLINT(performance-no-int-to-ptr)
}

#if defined(__x86_64__)
/// Like clflush, but the lines need not wait for each other: ten times faster.
[[gnu::target("clflushopt")]] void evict_unordered(std::span<const std::byte> bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data());
  for (std::uintptr_t at = begin / kLine * kLine; at < begin + bytes.size(); at += kLine)
    _mm_clflushopt(reinterpret_cast<void*>(at));  // NOLINT(performance-no-int-to-ptr)
}

bool has_clflushopt() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & bit_CLFLUSHOPT) != 0;
}
#endif

}  // namespace

#if defined(__x86_64__)
bool can_evict() { return true; }

void evict(std::span<const std::byte> bytes) {
  static const bool unordered = has_clflushopt();
  if (unordered) {
    evict_unordered(bytes);
  } else {
    each_line(bytes, [](void* line) { _mm_clflush(line); });
  }
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
