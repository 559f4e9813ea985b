#pragma once

#include <vector>

#include "tessera/base/trace.h"
#include "tessera/comm/host_collectives.h"

namespace tessera::tools {

/// Returns the events of all ranks, by rank. Collective.
std::vector<base::TraceEvent> gather_events(comm::HostCollectives& control, const std::vector<base::TraceEvent>& own);

}  // namespace tessera::tools
