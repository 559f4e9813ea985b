#include "tessera/fsdp/engine/cpu_offload.h"

#include <algorithm>

namespace tessera::fsdp {

CpuOffload::CpuOffload(Runtime& runtime, Copier& copier, bool poison)
    : runtime_(runtime),
      copier_(copier),
      poison_(poison),
      up_(runtime.device_runtime().make_copy_stream()),
      down_(runtime.device_runtime().make_copy_stream()) {}

void CpuOffload::finish() noexcept {
  try {
    up_->synchronize();
    down_->synchronize();
  } catch (const std::exception&) {  // a failed device copies nothing any more
  }
}

Buffer CpuOffload::allocate(std::size_t bytes) {
  base::DeviceRuntime& device = runtime_.device_runtime();
  MemoryTracker& memory_tracker = runtime_.memory_tracker();
  // Shapes without data need the host's memory as little as the device's.
  void* const data = has_data() ? device.allocate_host(bytes) : device.allocate(bytes);
  memory_tracker.add(MemoryCategory::offloaded, bytes);
  Buffer memory(data, bytes, [&device, &memory_tracker, real = has_data()](void* p, std::size_t n) {
    if (real)
      device.free_host(p, n);
    else
      device.free(p, n);
    memory_tracker.remove(MemoryCategory::offloaded, n);
  });
  clear(memory);
  return memory;
}

bool CpuOffload::has_data() const { return runtime_.device().type != base::DeviceType::meta; }

void CpuOffload::clear(Buffer& memory) const {
  if (has_data()) std::fill_n(memory.bytes_at(0), memory.bytes(), std::byte{0});
}

void CpuOffload::reserve(std::size_t chunk_bytes) {
  for (UpdateSlot& chunk : chunks_) chunk.memory = runtime_.memory().allocate(chunk_bytes, MemoryCategory::other);
}

std::size_t CpuOffload::aligned(std::size_t bytes) {
  return (bytes + base::kAlignment - 1) / base::kAlignment * base::kAlignment;
}

void CpuOffload::begin_chunk() {
  current_ = (current_ + 1) % chunks_.size();
  used_ = 0;
  up_->wait(chunks_[current_].free);
}

void* CpuOffload::suballocate(std::size_t bytes) {
  void* const at = chunks_[current_].memory.bytes_at(used_);
  used_ += aligned(bytes);
  return at;
}

void* CpuOffload::upload(const void* host, std::size_t bytes) {
  void* const device = suballocate(bytes);
  copier_.upload(*up_, device, host, bytes);
  return device;
}

void* CpuOffload::reserve_download(void* host, std::size_t bytes) {
  void* const device = suballocate(bytes);
  downloads_.push_back({host, device, bytes});
  return device;
}

void* CpuOffload::exchange(void* host, std::size_t bytes) {
  void* const device = reserve_download(host, bytes);
  copier_.upload(*up_, device, host, bytes);
  return device;
}

void CpuOffload::wait_for_uploads() { runtime_.stream().wait(up_->record()); }

void CpuOffload::start_downloads() {
  down_->wait(runtime_.stream().record());
  for (const Download& result : downloads_) copier_.download(*down_, result.host, result.device, result.bytes);
  downloads_.clear();
  UpdateSlot& chunk = chunks_[current_];
  if (poison_) runtime_.device_runtime().fill(*down_, chunk.memory.data(), 0xFF, chunk.memory.bytes());
  chunk.free = down_->record();
}

}  // namespace tessera::fsdp
