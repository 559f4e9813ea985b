// The identity of this process.
#pragma once

#include <array>
#include <cstdint>

#include "tessera/base/export.h"

namespace tessera::base {

/// An identifier unique among all processes, on this host and elsewhere, where pids may be equal: random bits and the
/// pid, so that a fork has another one. Thread-safe. Throws SystemError if the system provides no random bits.
using ProcessIdentity = std::array<std::uint64_t, 3>;
/// The identity of the calling process.
TESSERA_API ProcessIdentity this_process();

}  // namespace tessera::base
