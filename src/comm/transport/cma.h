// Memory of another process of this host, read by way of the kernel (process_vm_readv, "cross-memory attach"): one copy
// instead of two through memory that both share.
#pragma once

#include <cstddef>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/bootstrap.h"

namespace tessera::comm {

/// By rank: its process, where it and this rank can read each other's memory and both have TESSERA_CMA on; else 0, as
/// on another host, where a container, a security module or ptrace_scope forbids it, from one pid namespace to another.
/// Not for this rank itself, and for nobody where it is not `wanted` here. It is tried, not guessed. Collective; throws
/// InvalidUsage and what the bootstrap throws.
TESSERA_API std::vector<int> near_processes(Bootstrap& bootstrap, bool wanted = true);

/// Copies `bytes` at `from` in process `pid`. False: that process is gone. Throws SystemError.
TESSERA_API bool read_remote(int pid, const void* from, void* to, std::size_t bytes);

}  // namespace tessera::comm
