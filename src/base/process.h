// Which process this is.
#pragma once

#include <array>
#include <cstdint>

#include "tessera/base/export.h"

namespace tessera::base {

/// Tells this process from every other one, on this host and elsewhere, where pids may be equal: random bits and the
/// pid, so that a fork is another process. Thread-safe. Throws SystemError where the system gives no random bits.
using ProcessIdentity = std::array<std::uint64_t, 3>;
TESSERA_API ProcessIdentity this_process();

}  // namespace tessera::base
