// Start and end of MPI in this process. Both wait inside MPI for the other ranks without a deadline; so each runs in a
// thread of its own, and its caller waits only until the deadline.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "tessera/base/log.h"
#include "tessera/comm/base_names.h"

namespace tessera::comm::mpi {

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
