// The names of base and comm that this directory uses.
#pragma once

#include "tessera/comm/base_names.h"

namespace tessera::decorators {
using namespace base;  // NOLINT(google-build-using-namespace): one place, see the rules
using namespace comm;  // NOLINT(google-build-using-namespace)
}  // namespace tessera::decorators
