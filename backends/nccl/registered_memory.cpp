#include "backends/nccl/registered_memory.h"

#include <algorithm>

#include "backends/nccl/nccl_group.h"
#include "tessera/base/error.h"

namespace tessera::comm::nccl {
namespace {

/// NCCL's allocator works in steps of this size; a smaller block is not worth a registration.
constexpr std::size_t kRegisteredFrom = std::size_t{2} << 20;

}  // namespace

Buffer RegisteredMemory::allocate(std::size_t bytes, MemoryCategory use,
                                  std::shared_ptr<MemoryTracker> memory_tracker) {
  const DeviceGuard guard(api_, device_);
  const bool registered = registers(bytes);
  void* data = nullptr;
  std::string problem;
  if (registered) {
    const ncclResult_t result = api_.ncclMemAlloc(&data, bytes);
    if (result != ncclSuccess) problem = api_.ncclGetErrorString(result);
  } else {
    const cudaError_t error = api_.cudaMalloc(&data, std::max(bytes, kAlignment));
    if (error != cudaSuccess) problem = api_.cudaGetErrorString(error);
  }
  if (!problem.empty()) {
    api_.cudaGetLastError();
    throw SystemError("nccl: can't allocate " + std::to_string(bytes) + " bytes on device " + std::to_string(device_) +
                      ": " + problem);
  }
  if (registered) {
    const std::lock_guard lock(mutex_);
    Block& block = blocks_[data];
    block.bytes = bytes;
    for (NcclGroup* group : groups_) enter(*group, data, block);
  }
  if (memory_tracker != nullptr) memory_tracker->add(use, bytes);
  return {
      data, bytes,
      [self = shared_from_this(), use, memory_tracker = std::move(memory_tracker), registered](void* p, std::size_t n) {
        self->release(p, registered);
        if (memory_tracker != nullptr) memory_tracker->remove(use, n);
      }};
}

bool RegisteredMemory::registers(std::size_t bytes) const { return api_.registers() && bytes >= kRegisteredFrom; }

void RegisteredMemory::add_window(NcclGroup& group, void* data, Window window) {
  const std::lock_guard lock(mutex_);
  blocks_[data].windows[&group] = window;
}

std::vector<std::uint64_t> RegisteredMemory::windows_of(NcclGroup& group) {
  std::vector<std::uint64_t> numbers;
  const std::lock_guard lock(mutex_);
  for (const auto& [data, block] : blocks_)
    if (const auto found = block.windows.find(&group); found != block.windows.end())
      numbers.push_back(found->second.number);
  std::ranges::sort(numbers);
  return numbers;
}

std::string RegisteredMemory::describe_place(NcclGroup& group, const void* data) {
  const std::lock_guard lock(mutex_);
  auto after = blocks_.upper_bound(const_cast<void*>(data));
  if (after == blocks_.begin()) return "";
  const auto& [begin, block] = *--after;
  const auto offset = static_cast<const std::byte*>(data) - static_cast<const std::byte*>(begin);
  const auto found = block.windows.find(&group);
  if (found == block.windows.end() || static_cast<std::size_t>(offset) >= block.bytes) return "";
  return "window " + std::to_string(found->second.number) + " + " + std::to_string(offset) + " bytes";
}

void RegisteredMemory::enter(NcclGroup& group, void* data, Block& block) {
  if (void* handle = group.register_memory(data, block.bytes)) block.handles[&group] = handle;
}

void RegisteredMemory::release(void* data, bool registered) noexcept {
  const DeviceGuard guard(api_, device_, std::nothrow);
  if (registered) {
    const std::lock_guard lock(mutex_);
    for (const auto& [group, window] : blocks_[data].windows) group->deregister_window(window.handle);
    for (const auto& [group, handle] : blocks_[data].handles) group->deregister_memory(handle);
    blocks_.erase(data);
  }
  if (abandoned_->any()) return;
  if (registered)
    api_.ncclMemFree(data);
  else
    api_.cudaFree(data);
}

void RegisteredMemory::add(NcclGroup& group) {
  const std::lock_guard lock(mutex_);
  groups_.push_back(&group);
  for (auto& [data, block] : blocks_) enter(group, data, block);
}

void RegisteredMemory::remove(NcclGroup& group) noexcept {
  const std::lock_guard lock(mutex_);
  std::erase(groups_, &group);
  for (auto& [data, block] : blocks_) {
    if (const auto window = block.windows.extract(&group)) group.deregister_window(window.mapped().handle);
    const auto found = block.handles.find(&group);
    if (found == block.handles.end()) continue;
    group.deregister_memory(found->second);
    block.handles.erase(found);
  }
}

}  // namespace tessera::comm::nccl
