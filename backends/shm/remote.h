// Memory of another process that no window shows, read by way of the kernel (process_vm_readv, "cross-memory attach"):
// one copy instead of the two through tiles.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>

#include "backends/shm/base.h"
#include "tessera/base/env.h"
#include "tessera/comm/bootstrap.h"

namespace tessera::shm {

/// Whether every rank can read the memory of every other one: all have TESSERA_SHM_CMA on, and it was tried. They can
/// not where a container, a security module or ptrace_scope forbids it, nor from one pid namespace to another.
/// Collective.
bool can_read_remote(Bootstrap& bootstrap);

/// Copies `bytes` at `from` in process `pid`. False: that process is gone. Throws SystemError.
bool read_remote(pid_t pid, const std::byte* from, std::byte* to, std::size_t bytes);

std::span<const EnvVariable> variables();

}  // namespace tessera::shm
