// The bound that this machine's memory sets: the loads and stores of an operation on private memory, without
// synchronization; and the eviction of memory from the processor's caches for `bench --cold`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tessera/base/memory_pool.h"
#include "tools/bench/operations.h"

namespace tessera::tools {

enum class Stores : std::uint8_t { plain, non_temporal };

/// Private memory of one rank, with pages, and passes over it. Distinct addresses of the operation are distinct here
/// too.
class PrivateMemory {
 public:
  /// Allocates memory for any traffic up to `largest`.
  PrivateMemory(base::MemoryPool& pool, const MemoryTraffic& largest);

  /// Runs one pass: the loads and stores of `traffic`, once.
  void run(const MemoryTraffic& traffic, Stores stores) const;
  /// Evicts the memory of such a pass from the caches.
  void evict(const MemoryTraffic& traffic) const;

 private:
  base::Buffer from_;
  base::Buffer to_;
};

/// dst = the word-by-word sum of `sources` sources that lie `stride` bytes apart. All addresses are aligned to
/// base::kAlignment.
struct CombinePass {
  const std::byte* from = nullptr;
  std::size_t stride = 0;
  int sources = 1;
  std::byte* to = nullptr;
  std::size_t bytes = 0;
};
void combine_pass(const CombinePass& pass, Stores stores);

/// Whether this processor lets a program evict lines.
bool can_evict();

/// After the return, the next access to any of these bytes goes to memory. Their content is unchanged. Flushes lines by
/// address, which reaches every cache of the machine, including that of a peer that maps the memory. Reading a large
/// array instead evicts most lines but not all, depending on the caches' replacement policy, and takes as long for 8
/// bytes as for 64 MiB.
void evict(std::span<const std::byte> bytes);

}  // namespace tessera::tools
