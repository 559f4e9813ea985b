// The bound that this machine's memory sets: the loads and stores of an operation on private memory, without
// synchronization.
#pragma once

#include <cstddef>

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

/// dst = the word-by-word sum of `sources` pieces that lie `stride` bytes apart. All addresses are aligned to
/// base::kAlignment.
struct CombinePass {
  const std::byte* from = nullptr;
  std::size_t stride = 0;
  int sources = 1;
  std::byte* to = nullptr;
  std::size_t bytes = 0;
};
void combine_pass(const CombinePass& pass, Stores stores);

}  // namespace tessera::tools
