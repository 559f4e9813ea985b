// The transport of this backend, for the communicator and for tests of the bare transport.
#pragma once

#include <memory>

#include "tessera/comm/base_names.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/transport.h"

namespace tessera::comm::ucx {

/// Collective. Throws BackendError, and what the bootstrap throws.
std::unique_ptr<Transport> make_transport(Bootstrap& bootstrap, TransportEvents& events);

}  // namespace tessera::comm::ucx
