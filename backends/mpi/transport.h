// The transport of this backend, for the communicator and for tests of the bare transport.
#pragma once

#include <chrono>
#include <memory>

#include "tessera/comm/base_names.h"
#include "backends/mpi/collectives.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/transport.h"

namespace tessera::comm::mpi {

/// Collective. One MPI call moves at most `longest_piece` bytes (tests: a few). Throws InvalidUsage, BackendError,
/// Timeout, and what the bootstrap throws.
std::unique_ptr<Transport> make_transport(Bootstrap& bootstrap, TransportEvents& events,
                                          std::chrono::milliseconds timeout, std::size_t longest_piece = kLongestPiece);

}  // namespace tessera::comm::mpi
