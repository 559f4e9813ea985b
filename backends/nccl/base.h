// Imports the names of base and comm into this backend's namespace.
#pragma once

#include <chrono>

#include "tessera/comm/base.h"

namespace tessera::nccl {
using namespace base;  // NOLINT(google-build-using-namespace): one place, see the rules
using namespace comm;  // NOLINT(google-build-using-namespace)
using Clock = std::chrono::steady_clock;
}  // namespace tessera::nccl
