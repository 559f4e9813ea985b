// Copies between the host and a context's device. The host accesses tensor data only through these functions.
#pragma once

#include <functional>
#include <vector>

#include "tessera/nn/context.h"

namespace tessera::nn {

/// Calls `write` with a host buffer of `bytes` bytes, which `write` fills before it returns. Work appended to the
/// compute stream after this call finds the data at `to`. If the host shares the device's memory, `write` gets `to`
/// itself; earlier work that uses it must have completed. On meta `write` is not called.
TESSERA_API void upload(Context& context, void* to, std::size_t bytes, const std::function<void(void*)>& write);

/// Waits for the compute stream and calls `read` with host memory that holds the data at `from`; valid during the call.
/// Throws InvalidUsage on meta.
TESSERA_API void download(Context& context, const void* from, std::size_t bytes,
                          const std::function<void(const void*)>& read);

/// Pinned host memory that copies pass through, cached for later copies. One per context.
class PinnedBufferCache {
 public:
  explicit PinnedBufferCache(DeviceRuntime& runtime) : runtime_(runtime) {}  ///< `runtime` outlives the cache
  ~PinnedBufferCache();
  PinnedBufferCache(const PinnedBufferCache&) = delete;
  PinnedBufferCache& operator=(const PinnedBufferCache&) = delete;

  /// A pinned buffer.
  struct Block {
    void* data = nullptr;   ///< memory of DeviceRuntime::allocate_host()
    std::size_t bytes = 0;  ///< size of the buffer, at least as requested
    Event free;             ///< reached when the last copy that used the buffer is complete
  };
  /// An idle block of at least `bytes`, or a new one, until destruction. Then it is reused once `free` is reached.
  class Lease {
   public:
    /// `cache` outlives it. Throws what DeviceRuntime::allocate_host() throws.
    Lease(PinnedBufferCache& cache, std::size_t bytes) : cache_(cache), block_(cache.acquire(bytes)) {}
    ~Lease() { cache_.blocks_.push_back(std::move(block_)); }  // acquire() made room
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    Block* operator->() { return &block_; }  ///< the block

   private:
    PinnedBufferCache& cache_;
    Block block_;
  };

 private:
  Block acquire(std::size_t bytes);

  static constexpr std::size_t kKept = std::size_t{64} << 20;  // larger blocks are freed when they are idle
  DeviceRuntime& runtime_;
  std::vector<Block> blocks_;
};

}  // namespace tessera::nn
