// The MPI of this process: there can be only one, started once and ended once. So this is the one place with state of
// the process; nothing else in this folder has any.
#pragma once

#include <mpi.h>

#include <chrono>
#include <string>
#include <vector>

#include "backends/mpi/base.h"
#include "tessera/comm/bootstrap.h"

namespace tessera::mpi {

/// "" or why this module is the wrong one here: the launcher belongs to another MPI, or the program has loaded one.
std::string wrong_library();

/// A communicator of our own with all ranks of the bootstrap, and who they are in it.
struct Ranks {
  MPI_Comm comm = MPI_COMM_NULL;  ///< null for a world of one rank, which needs no MPI
  std::vector<int> mpi_rank;      ///< by rank of the bootstrap
  int largest_tag = 0;
};

/// Starts MPI unless the program has; then it is ended when the process exits in good order. Collective. Throws
/// InvalidUsage where MPI doesn't know these ranks, BackendError, Timeout, and what the bootstrap throws.
Ranks open_ranks(Bootstrap& bootstrap, std::chrono::milliseconds timeout);

/// Gives the communicator back. `doubtful`: operations failed, so that other ranks may not come to their end, and at
/// exit MPI is ended only if they all do within seconds. Where `failed` says why, the communicator is left as it is,
/// MPI is not ended at all, and new communicators are refused with this reason.
void close_ranks(Ranks& ranks, bool doubtful, const std::string& failed);

/// MPI's words for an error code.
std::string text_of(int code);

}  // namespace tessera::mpi
