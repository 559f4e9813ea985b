// The floating-point environment in which the library computes.
#pragma once

#include <cstdint>

namespace tessera::base {

/// While it exists, the calling thread rounds to nearest, keeps subnormals and raises no signals, as IEEE 754 and the C
/// standard define the default. A program may have changed that for its own threads (flush-to-zero by -ffast-math or
/// torch.set_flush_denormal, a rounding mode): results would then depend on which thread computes. Restores the
/// caller's environment at the end. Costs a few cycles where nothing differs.
class FpEnvironment {
 public:
  FpEnvironment() noexcept : before_(read()) {
    if ((before_ & kControl) != kDefault) write(kDefault);
  }
  ~FpEnvironment() {
    if ((before_ & kControl) != kDefault) write(before_);
  }
  FpEnvironment(const FpEnvironment&) = delete;
  FpEnvironment& operator=(const FpEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr std::uint64_t kControl = 0xffc0;  // MXCSR without the flags of past exceptions
  static constexpr std::uint64_t kDefault = 0x1f80;  // all exceptions masked
  static std::uint64_t read() noexcept { return __builtin_ia32_stmxcsr(); }
  static void write(std::uint64_t value) noexcept { __builtin_ia32_ldmxcsr(static_cast<unsigned>(value)); }
#elif defined(__aarch64__)
  static constexpr std::uint64_t kControl = ~std::uint64_t{0};
  static constexpr std::uint64_t kDefault = 0;
  static std::uint64_t read() noexcept {
    std::uint64_t value = 0;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(std::uint64_t value) noexcept { asm volatile("msr fpcr, %0" ::"r"(value) : "memory"); }
#else
  static constexpr std::uint64_t kControl = 0;
  static constexpr std::uint64_t kDefault = 0;
  static std::uint64_t read() noexcept { return 0; }
  static void write(std::uint64_t) noexcept {}
#endif
  const std::uint64_t before_;
};

}  // namespace tessera::base
