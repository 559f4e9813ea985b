// Makes the names of base available to comm's headers.
#pragma once

namespace tessera::base {}
/// Communicators, their backends, and the interfaces under them.
namespace tessera::comm {
using namespace base;  // NOLINT(google-build-using-namespace): one place, see the rules
}
