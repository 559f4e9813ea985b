// Reads rank and world size from the launcher's environment variables.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/base_names.h"

namespace tessera::comm {

/// The identity of a rank in its job, as a launcher assigned it. Default: a world of one.
struct Launch {
  /// "tessera", "torchrun", "openmpi", "mvapich", "pmi", "slurm"; "none": a world of one.
  std::string launcher = "none";
  int rank = 0;               ///< global rank, below `size`
  int size = 1;               ///< number of ranks in the job
  int local_rank = 0;         ///< rank among those of this host; never used as proof that other ranks are on this host
  int local_size = 1;         ///< number of the job's ranks on this host; `size` if no launcher provides it
  std::string job;            ///< identifies this run: common to its ranks and unique among the user's runs
  bool job_is_local = false;  ///< ranks on other hosts have another `job`, since the launcher names none
  std::uint64_t restart = 0;  ///< how often the launcher has restarted this run; also part of `job`
  /// Counts the worlds that these processes create in succession. A rank that has finished one world and starts the
  /// next must not connect to the previous one, where other ranks still work. Launchers don't provide it; the program
  /// counts.
  std::uint32_t generation = 0;
};

/// Reads a variable; empty if it is unset or empty.
using EnvReader = std::function<std::optional<std::string>(const std::string& name)>;

/// Checks, in this order: TESSERA_RANK and TESSERA_WORLD_SIZE, torchrun, Open MPI, MVAPICH, PMI and PALS, Slurm (needs
/// SLURM_STEP_ID, since a batch script's own environment has SLURM_PROCID too), none. TESSERA_LAUNCHER forces one. The
/// local rank and number of ranks come from another of them that tells the same rank and size, if the first has none.
/// TESSERA_RUN_ID names the job under each. Throws InvalidUsage, listing the variables found, if a launcher's variables
/// are incomplete or contradictory, or if this were a world of one, though a variable tells that the process is one of
/// several (unless TESSERA_RANK or TESSERA_LAUNCHER says so); it never falls back to a world of one.
TESSERA_API Launch resolve_launch(const EnvReader& read);

/// The same for the environment of this process.
TESSERA_API Launch resolve_launch();

/// The variables by which launchers tell a process its rank and the number of ranks. A program that starts a world of
/// its own through another launcher removes them from the environment first: they tell its own place. Without Slurm's,
/// which that launcher may need.
TESSERA_API std::vector<std::string> rank_variables();

}  // namespace tessera::comm
