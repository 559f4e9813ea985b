// Identifiers of the host and the pid namespace of this process.
#pragma once

#include <string>

#include "tessera/base/export.h"
#include "tessera/comm/base_names.h"

namespace tessera::comm {

/// The running kernel and the network namespace: processes that share both can reach each other without a network.
TESSERA_API std::string host_identity();
/// Processes with equal values use the same pids.
std::string process_space();

}  // namespace tessera::comm
