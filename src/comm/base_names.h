// The names of base, as comm's headers use them.
#pragma once

namespace tessera::base {}
namespace tessera::comm {
using namespace base;  // NOLINT(google-build-using-namespace): one place, see the rules
}
