// The MPI of this process: there can be only one, started once and ended once. So this is the one place with state of
// the process; nothing else in this folder has any.
#pragma once

#include <mpi.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/base_names.h"
#include "tessera/base/log.h"
#include "tessera/comm/bootstrap.h"

namespace tessera::comm::mpi {

/// "" or why this module is the wrong one here: the launcher belongs to another MPI, or the program has loaded one.
std::string wrong_library();

/// A communicator of our own with all ranks of the bootstrap, and who they are in it.
struct Ranks {
  MPI_Comm comm = MPI_COMM_NULL;  ///< null for a world of one rank, which needs no MPI
  std::vector<int> mpi_rank;      ///< by rank of the bootstrap
  int largest_tag = 0;
};

/// Where this process says, when it exits, that it could not end MPI in good order. May be null.
void log_end_to(std::shared_ptr<Logger> logger);

/// Starts MPI unless the program has; then it is ended when the process exits in good order. Collective. Throws
/// InvalidUsage where MPI doesn't know these ranks, BackendError, Timeout, and what the bootstrap throws.
Ranks open_ranks(Bootstrap& bootstrap, std::chrono::milliseconds timeout);

/// Gives the communicator back. `doubtful`: operations failed, so that other ranks may not come to their end, and at
/// exit MPI is ended only if they all do within seconds. Where `failed` says why, the communicator is left as it is,
/// MPI is not ended at all, and new communicators are refused with this reason.
void close_ranks(Ranks& ranks, bool doubtful, const std::string& failed);

/// MPI's words for an error code, in one line.
std::string text_of(int code);

/// Why MPI has made none: its own words seldom say so.
std::string no_more_communicators(int code);

/// Whether MPI is as good as before when it couldn't make a communicator. Open MPI 4.1 isn't: with MPI_Comm_idup it
/// frees memory in which a sum of its own is still under way, and whatever call comes next goes on with that.
#if defined(OPEN_MPI)
inline constexpr bool kSurvivesExhaustion = false;
#else
inline constexpr bool kSurvivesExhaustion = true;
#endif

/// Where MPI can't make a communicator it asks the handlers of its own ones, and a program that started MPI itself may
/// have left them as they are: they end the process. While this lives they return.
class ErrorsReturned {
 public:
  ErrorsReturned() noexcept;
  ~ErrorsReturned();
  ErrorsReturned(const ErrorsReturned&) = delete;
  ErrorsReturned& operator=(const ErrorsReturned&) = delete;

 private:
  MPI_Errhandler of_world_ = MPI_ERRHANDLER_NULL;
  MPI_Errhandler of_self_ = MPI_ERRHANDLER_NULL;
};

}  // namespace tessera::comm::mpi
