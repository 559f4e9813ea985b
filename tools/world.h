// This process's place: a rank of a world, or the one who starts it.
#pragma once

#include <span>

#include "tessera/base/env.h"

namespace tessera::tools {

struct World {
  bool is_rank = false;        ///< a launcher started this process as one of `size`
  bool started_by_us = false;  ///< that launcher is this tool's, on this host
  int rank = 0;
  int size = 1;
};

/// Throws InvalidUsage where the variables are half set or no numbers.
World this_world();

/// The variables that tell a rank its place.
std::span<const base::EnvVariable> world_variables();

}  // namespace tessera::tools
