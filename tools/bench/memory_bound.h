// What the memory of this machine allows: the loads and stores of an operation on private memory, without
// synchronisation.
#pragma once

#include <cstddef>

#include "tessera/base/memory_pool.h"
#include "tools/bench/operations.h"

namespace tessera::tools {

enum class Stores : std::uint8_t { plain, non_temporal };

/// Private memory of one rank, faulted in, and passes over it. Distinct addresses of the operation are distinct here
/// too.
class PrivateMemory {
 public:
  /// Room for every traffic up to this one.
  PrivateMemory(base::MemoryPool& pool, const MemoryTraffic& largest);

  /// One pass: what `traffic` says, once.
  void run(const MemoryTraffic& traffic, Stores stores) const;
  /// Takes what such a pass touches out of the caches.
  void evict(const MemoryTraffic& traffic) const;

 private:
  base::Buffer from_;
  base::Buffer to_;
};

/// dst = the sum, word by word, of `sources` pieces that lie `stride` bytes apart. Everything is aligned to
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
