// What an operation needs of its rank's ports.
#pragma once

#include <span>

#include "tessera/comm/communicator.h"
#include "tessera/comm/slow_link/ports.h"
#include "tessera/comm/slow_link/slow_link.h"

namespace tessera::comm {

/// The members of a communicator, of which `rank` is this one.
struct LinkedGroup {
  const SlowLinks& links;
  int world_size = 1;
  std::span<const int> members;  ///< ranks of the world
  int rank = 0;
};

/// Of one operation, or of the parts of a batch, which pass together.
TESSERA_API PortUse port_use(const LinkedGroup& group, std::span<const OpDesc> calls);

}  // namespace tessera::comm
