// The identity of this process.
#pragma once

#include <array>
#include <cstdint>

#include "tessera/base/export.h"

namespace tessera::base {

/// An identifier unique among all processes, on this host and elsewhere, where pids may be equal: random bits and the
/// pid, so that a fork has another one. Thread-safe. Throws SystemError if the system provides no random bits.
using ProcessIdentity = std::array<std::uint64_t, 3>;
/// How many forks lie between this process and the program's start or, if none was counted before, the first call.
/// Something that was made under another number belongs to the parent. Thread-safe.
TESSERA_API std::uint32_t fork_count() noexcept;

/// The identity of the calling process.
TESSERA_API ProcessIdentity this_process();

}  // namespace tessera::base
