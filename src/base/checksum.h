// Checksums (XXH3, 64 bits) that detect damaged bytes. They don't authenticate the sender.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "tessera/base/export.h"

namespace tessera::base {

/// The 64-bit XXH3 hash of `bytes`. Thread-safe.
TESSERA_API std::uint64_t checksum(std::span<const std::byte> bytes) noexcept;

/// The checksum of bytes that arrive in parts. Owns a little memory, which reset() keeps.
class TESSERA_API RunningChecksum {
 public:
  RunningChecksum();
  RunningChecksum(RunningChecksum&&) noexcept;  ///< leaves the source fit only for assignment and destruction
  RunningChecksum& operator=(RunningChecksum&&) noexcept;  ///< moves, as the constructor does
  ~RunningChecksum();
  void reset() noexcept;  ///< discards the bytes added so far
  /// Continues the hash; how the bytes are divided into calls has no effect.
  void add(std::span<const std::byte> bytes) noexcept;
  /// The checksum of the bytes added since the last reset().
  std::uint64_t value() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::base
