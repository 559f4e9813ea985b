// Who am I? Finds rank and world size in what the launcher left in the environment.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/export.h"
#include "tessera/comm/base_names.h"

namespace tessera::comm {

struct Launch {
  std::string launcher = "none";  ///< "tessera", "torchrun", "openmpi", "pmi", "slurm"; "none": a world of one
  int rank = 0;
  int size = 1;
  int local_rank = 0;  ///< on this host; never taken as a proof that others are here
  int local_size = 1;
  std::string job;            ///< what this run's ranks have in common and no other run of this user has
  bool job_is_local = false;  ///< ranks on other hosts have another `job`: the launcher names none
  std::uint64_t restart = 0;  ///< how often the launcher has started this run again; part of `job` too
  /// Which of the worlds that these processes make one after another: a rank that is done with one, and comes for the
  /// next, must not knock at the one before, where others still work. No launcher says it: the program counts.
  std::uint32_t generation = 0;
};

/// Looks a variable up; nothing where it is unset or empty.
using EnvReader = std::function<std::optional<std::string>(const std::string& name)>;

/// In this order: TESSERA_RANK and TESSERA_WORLD_SIZE, torchrun, Open MPI, PMI and PALS, Slurm (needs SLURM_STEP_ID: a
/// batch script's own environment has SLURM_PROCID too), none. TESSERA_LAUNCHER forces one. Throws InvalidUsage where a
/// launcher's variables are half set or contradict each other, listing what was found: it never falls back to a world
/// of one.
TESSERA_API Launch resolve_launch(const EnvReader& read);

/// The same for this process's environment.
TESSERA_API Launch resolve_launch();

}  // namespace tessera::comm
