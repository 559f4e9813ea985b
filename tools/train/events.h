#pragma once

#include <string>
#include <vector>

#include "tessera/base/trace.h"
#include "tessera/comm/host_collectives.h"

namespace tessera::tools {

/// The texts of all ranks, by rank, on every rank. Collective.
std::vector<std::string> gather_texts(comm::HostCollectives& control, const std::string& own);

/// Returns the events of all ranks, by rank. Collective.
std::vector<base::TraceEvent> gather_events(comm::HostCollectives& control, const std::vector<base::TraceEvent>& own);

}  // namespace tessera::tools
