// Takes memory out of the processor's caches: `bench --cold`.
//
// Lines are flushed by address, which reaches every cache of the machine, also that of a peer which has the memory
// mapped. Reading a large array instead would push out most lines and leave some, depending on the caches' replacement,
// and takes as long for 8 bytes as for 64 MiB.
#pragma once

#include <cstddef>
#include <span>

namespace tessera::tools {

/// Whether this processor lets a program do that.
bool can_evict();

/// When it returns, the next access to any of these bytes goes to memory. Their content stays.
void evict(std::span<const std::byte> bytes);

}  // namespace tessera::tools
