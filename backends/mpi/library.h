// The MPI library of this process. A process initializes MPI once and finalizes it once, so this is the only place in
// this folder with process-wide state.
#pragma once

#include <mpi.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/log.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/transport.h"

namespace tessera::comm::mpi {

/// Returns "" or why this module is the wrong one: the launcher belongs to another MPI, or the program has loaded
/// another.
std::string wrong_library();

/// An own communicator with all ranks of the bootstrap, and their ranks in it.
struct Ranks {
  MPI_Comm comm = MPI_COMM_NULL;  ///< null for a world of one rank, which needs no MPI
  std::vector<int> mpi_rank;      ///< by rank of the bootstrap
  int largest_tag = 0;
  TransportEvents* world = nullptr;  ///< whose communicator it is
};

/// Sets the logger for a failure to finalize MPI in good order at process exit. May be null.
void log_end_to(std::shared_ptr<Logger> logger);

/// Starts MPI unless the program has started it; in that case, MPI is finalized when the process exits in good order.
/// If `world` is still open then, and the exit code is 0, it is told to leave first. Collective. Throws InvalidUsage if
/// MPI doesn't know these ranks, BackendError, Timeout, and what the bootstrap throws.
Ranks open_ranks(Bootstrap& bootstrap, TransportEvents& world, std::chrono::milliseconds timeout);

/// Releases the communicator. `doubtful`: operations failed, so other ranks may not reach their end, and at exit MPI is
/// finalized only if all of them do within seconds. If `failed` gives a reason, the communicator is left as it is, MPI
/// is not finalized, and new communicators are refused with this reason.
void close_ranks(Ranks& ranks, bool doubtful, const std::string& failed);

/// MPI's text for an error code, in one line.
std::string text_of(int code);

/// Why MPI created no communicator: its own text seldom says so.
std::string no_more_communicators(int code);

/// Whether MPI is still usable after it failed to create a communicator. Open MPI 4.1 is not: MPI_Comm_idup frees
/// memory of a reduction of its own that is still in flight, and the next call of any kind continues it.
#if defined(OPEN_MPI)
inline constexpr bool kSurvivesExhaustion = false;
#else
inline constexpr bool kSurvivesExhaustion = true;
#endif

/// While an object lives, MPI's error handlers return. If MPI can't create a communicator, it calls the handlers of its
/// predefined ones; a program that started MPI itself may have left the default, which ends the process.
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

// Start and end of MPI in this process. Both wait inside MPI for the other ranks without a deadline; so each runs in a
// thread of its own, and its caller waits only until the deadline (library.cpp).

/// The decision at process exit whether and how to finalize MPI.
struct ExitPlan {
  bool wanted = false;                 ///< by this library: no other code does, and MPI can still be called
  bool doubtful = false;               ///< operations failed: other ranks may not reach their end
  std::chrono::milliseconds patience;  ///< for the other ranks
  std::shared_ptr<Logger> logger;      ///< may be null
};

/// Calls MPI_Init_thread and registers an exit handler that calls `plan` with the exit code and finalizes MPI
/// accordingly. Returns MPI's thread level. Throws BackendError, and Timeout if MPI_Init_thread does not return within
/// `patience`: then a thread of this process stays inside MPI, and the process ends without running the exit code of
/// libraries.
int start_library(std::chrono::milliseconds patience, std::function<ExitPlan(int)> plan);

}  // namespace tessera::comm::mpi
