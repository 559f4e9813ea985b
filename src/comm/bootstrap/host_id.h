// Which host and which set of processes this one belongs to.
#pragma once

#include <string>

#include "tessera/comm/base_names.h"

namespace tessera::comm {

/// The running kernel and the network namespace: processes that share both can reach each other without a network.
std::string host_identity();
/// Processes with the same one know each other by the same pids.
std::string process_space();

}  // namespace tessera::comm
