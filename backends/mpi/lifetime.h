// How MPI starts and ends in this process. Both wait inside MPI for the other ranks, without a deadline: so each runs
// in a thread of its own, and who asked for it waits until the deadline only.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "tessera/comm/base_names.h"
#include "tessera/base/log.h"

namespace tessera::comm::mpi {

/// What decides at the end of the process whether and how MPI is ended.
struct ExitPlan {
  bool wanted = false;                 ///< by us: nobody else ends it, and it can still be called
  bool doubtful = false;               ///< operations failed: other ranks may not come to their end
  std::chrono::milliseconds patience;  ///< for the other ranks
  std::shared_ptr<Logger> logger;      ///< may be null
};

/// Calls MPI_Init_thread and has `plan` asked, and MPI ended accordingly, when the process exits. Returns the level of
/// threads that MPI offers. Throws BackendError, and Timeout where it doesn't return within `patience`: then a thread
/// of this process stays inside MPI, and the process ends without running what a library does at its end.
int start_library(std::chrono::milliseconds patience, std::function<ExitPlan()> plan);

}  // namespace tessera::comm::mpi
