// Evicts memory from the processor's caches: `bench --cold`.
//
// Lines are flushed by address, which reaches every cache of the machine, including that of a peer that maps the
// memory. Reading a large array instead evicts most lines but not all, depending on the caches' replacement policy, and
// takes as long for 8 bytes as for 64 MiB.
#pragma once

#include <cstddef>
#include <span>

namespace tessera::tools {

/// Whether this processor lets a program evict lines.
bool can_evict();

/// After the return, the next access to any of these bytes goes to memory. Their content is unchanged.
void evict(std::span<const std::byte> bytes);

}  // namespace tessera::tools
