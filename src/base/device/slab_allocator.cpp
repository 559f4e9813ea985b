#include "tessera/base/device/slab_allocator.h"

#include <bit>

namespace tessera::base {

SlabAllocator::~SlabAllocator() {
  memory_tracker_.hold(-static_cast<std::int64_t>(slabs_.size() * slab_bytes_));
  for (void* slab : slabs_) runtime_.free(slab, slab_bytes_);
}

std::size_t SlabAllocator::size_class(std::size_t bytes) {
  return bytes <= kMinBytes ? kMinBytes : std::bit_ceil(bytes);
}

void* SlabAllocator::acquire(std::size_t bytes) {
  const std::size_t size = size_class(bytes);
  std::unique_lock lock(mutex_);
  std::vector<void*>& idle = idle_[size];
  const auto is_full = [&] { return idle.empty() && (slabs_.empty() || used_ + size > slab_bytes_); };
  if (is_full()) {
    lock.unlock();  // other threads may have to release blocks before a stream goes on
    runtime_.wait_for_host_events();
    lock.lock();
  }
  if (idle.empty()) {
    if (is_full()) {
      slabs_.push_back(runtime_.allocate(slab_bytes_));  // under one block of the previous slab stays unused
      used_ = 0;
      memory_tracker_.hold(static_cast<std::int64_t>(slab_bytes_));
    }
    idle.push_back(static_cast<std::byte*>(slabs_.back()) + used_);
    used_ += size;
  }
  void* data = idle.back();
  idle.pop_back();
  memory_tracker_.hold(-static_cast<std::int64_t>(bytes));
  return data;
}

void SlabAllocator::release(void* data, std::size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  idle_[size_class(bytes)].push_back(data);
  memory_tracker_.hold(static_cast<std::int64_t>(bytes));
}

}  // namespace tessera::base
