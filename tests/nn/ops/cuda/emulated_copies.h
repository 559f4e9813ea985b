// Emulates cp.async and ldmatrix for one thread: what they require and when data arrives.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <vector>

namespace tessera::emulation {

/// Thrown where a kernel would hang on a GPU, access memory out of bounds or use an instruction wrongly.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline constexpr std::size_t kCopyBytes = 16;  // of one copy, and of a row of a matrix

inline void check_alignment(const void* address, const char* instruction) {
  if (reinterpret_cast<std::uintptr_t>(address) % kCopyBytes != 0)
    throw Failure(std::string(instruction) + ": an address is not aligned to 16 bytes");
}

/// The asynchronous copies of one thread. The bytes of a copy arrive no earlier than a GPU guarantees: when the thread
/// waits for them. Until then their place is poisoned.
class AsyncCopies {
 public:
  void clear() {
    open_.clear();
    groups_.clear();
  }
  void begin(void* to, const void* from, bool inside) {
    check_alignment(to, "cp.async");
    check_alignment(from, "cp.async");
    std::memset(to, 0xFF, kCopyBytes);
    open_.push_back({to, inside ? from : nullptr});
  }
  void commit() {
    groups_.push_back(std::move(open_));
    open_.clear();
  }
  void wait(std::size_t pending) {
    for (; groups_.size() > pending; groups_.pop_front())
      for (const Copy& copy : groups_.front())
        if (copy.from != nullptr)
          std::memcpy(copy.to, copy.from, kCopyBytes);
        else
          std::memset(copy.to, 0, kCopyBytes);
  }
  /// True if the thread has started copies for which it has not waited.
  bool pending() const {
    if (!open_.empty()) return true;
    for (const auto& group : groups_)
      if (!group.empty()) return true;
    return false;
  }

 private:
  struct Copy {
    void* to;
    const void* from;  ///< null: zeros
  };
  std::vector<Copy> open_;
  std::deque<std::vector<Copy>> groups_;
};

/// A device's instructions have one NaN as their result.
inline float with_device_nan(float result) {
  return std::isnan(result) ? std::bit_cast<float>(std::uint32_t{0x7fffffffU}) : result;
}

/// The exact result of an approximate instruction, as far off as it may be: by 2^-22 of itself, with either sign, which
/// depends on the operand; no subnormal numbers.
inline float approximate(double exact, float operand) {
  std::uint32_t bits;
  std::memcpy(&bits, &operand, sizeof(bits));
  const double error = (bits & 1) != 0 ? 3 * 0x1p-24 : -3 * 0x1p-24;  // rounding adds another 2^-24
  const auto result = static_cast<float>(exact * (1 + error));
  return std::abs(result) < 0x1p-126F ? 0.0F : result;
}
/// 2^x, as by ex2.approx.ftz.f32.
inline float fast_exp2(float x) { return approximate(std::exp2(static_cast<double>(x)), x); }
/// 1 / x, as by rcp.approx.ftz.f32.
inline float fast_reciprocal(float x) { return approximate(1.0 / (std::abs(x) < 0x1p-126F ? 0.0 : x), x); }

}  // namespace tessera::emulation
