// Small blocks of device memory, split off large slabs.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

#include "tessera/base/device_runtime.h"
#include "tessera/base/memory_tracker.h"

namespace tessera::base {

/// Allocates blocks of 512 bytes times a power of two. They stay split until this object is destroyed. What is held
/// beyond the requests is reported to the tracker. Thread-safe.
class SlabAllocator {
 public:
  SlabAllocator(DeviceRuntime& runtime, MemoryTracker& memory_tracker, std::size_t largest)
      : runtime_(runtime), memory_tracker_(memory_tracker), slab_bytes_(largest > kSlab ? largest * 2 : kSlab) {}
  ~SlabAllocator();

  void* acquire(std::size_t bytes);
  void release(void* data, std::size_t bytes) noexcept;

 private:
  static constexpr std::size_t kMinBytes = 512;
  static constexpr std::size_t kSlab = std::size_t{2} << 20;
  static std::size_t size_class(std::size_t bytes);

  DeviceRuntime& runtime_;
  MemoryTracker& memory_tracker_;
  const std::size_t slab_bytes_;
  std::mutex mutex_;
  std::map<std::size_t, std::vector<void*>> idle_;  // by size
  std::vector<void*> slabs_;
  std::size_t used_ = 0;  // of the newest slab
};

}  // namespace tessera::base
