// Imports the names of base and comm into this backend's namespace.
#pragma once

#include "tessera/comm/base.h"

namespace tessera::sim {
using namespace base;  // NOLINT(google-build-using-namespace): one place, see the rules
using namespace comm;  // NOLINT(google-build-using-namespace)
}  // namespace tessera::sim
