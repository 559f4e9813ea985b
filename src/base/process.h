// The identity of this process.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "tessera/base/export.h"

namespace tessera::base {

/// An identifier unique among all processes, on this host and elsewhere, where pids may be equal: random bits and the
/// pid, so that a fork has another one. Thread-safe. Throws SystemError if the system provides no random bits.
using ProcessIdentity = std::array<std::uint64_t, 3>;
/// The identity of the calling process.
TESSERA_API ProcessIdentity this_process();

/// Tells a fork from the process that made an object: remember this value when the object is made, and the object
/// belongs to a parent where it differs from forks_so_far(). Thread-safe.
TESSERA_API std::uint32_t count_forks() noexcept;

TESSERA_API extern std::atomic<std::uint32_t> forks;  ///< since the first call of count_forks()
/// The same as count_forks(), after the first call of it: a load.
inline std::uint32_t forks_so_far() noexcept { return forks.load(std::memory_order_relaxed); }

}  // namespace tessera::base
