#pragma once

#include <vector>

#include "tessera/base/events.h"
#include "tessera/comm/host_exchange.h"

namespace tessera::tools {

/// Those of all ranks, by rank. Collective.
std::vector<base::EventRecord> gather_events(comm::HostExchange& control, const std::vector<base::EventRecord>& own);

}  // namespace tessera::tools
