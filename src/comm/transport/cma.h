// CMA: reads memory of another process on this host through the kernel (process_vm_readv, "cross-memory attach"). One
// copy instead of two through shared memory.
#pragma once

#include <cstddef>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/bootstrap.h"

namespace tessera::comm {

/// Returns the pid of each rank that supports CMA: it and this rank can read each other's memory, and both have
/// TESSERA_CMA on. 0 otherwise: on another host, if a container, a security module or ptrace_scope forbids it, across
/// pid namespaces, for this rank itself, and for all ranks if it is not `wanted` here. Determined by a trial read.
/// Collective; throws InvalidUsage and the bootstrap's errors.
TESSERA_API std::vector<int> cma_processes(Bootstrap& bootstrap, bool wanted = true);

/// Copies `bytes` from `from` in process `pid`, which is `rank`. False: that process is gone. Throws SystemError, which
/// names both and the remedy.
TESSERA_API bool cma_read(int pid, int rank, const void* from, void* to, std::size_t bytes);

}  // namespace tessera::comm
