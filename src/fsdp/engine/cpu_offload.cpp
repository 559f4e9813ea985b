#include "tessera/fsdp/engine/cpu_offload.h"

#include <algorithm>

namespace tessera::fsdp {

CpuOffload::CpuOffload(nn::Context& context, Copier& copier, bool poison)
    : context_(context),
      copier_(copier),
      poison_(poison),
      up_(context.runtime().make_copy_stream()),
      down_(context.runtime().make_copy_stream()) {}

void CpuOffload::finish() noexcept {
  try {
    up_->synchronize();
    down_->synchronize();
  } catch (const std::exception&) {  // a failed device copies nothing any more
  }
}

Buffer CpuOffload::allocate(std::size_t bytes) {
  base::DeviceRuntime& runtime = context_.runtime();
  MemoryTracker& memory_tracker = context_.memory_tracker();
  auto* const data = static_cast<std::byte*>(runtime.allocate_host(bytes));
  std::fill_n(data, bytes, std::byte{0});
  memory_tracker.add(MemoryCategory::offloaded, bytes);
  return {data, bytes, [&runtime, &memory_tracker](void* p, std::size_t n) {
            runtime.free_host(p, n);
            memory_tracker.remove(MemoryCategory::offloaded, n);
          }};
}

void CpuOffload::reserve(std::size_t piece_bytes) {
  for (UpdateSlot& piece : pieces_) piece.room = context_.memory().allocate(piece_bytes, MemoryCategory::other);
}

std::size_t CpuOffload::room_of(std::size_t bytes) {
  return (bytes + base::kAlignment - 1) / base::kAlignment * base::kAlignment;
}

void CpuOffload::begin_piece() {
  current_ = (current_ + 1) % pieces_.size();
  used_ = 0;
  up_->wait(pieces_[current_].free);
}

void* CpuOffload::room_for(std::size_t bytes) {
  void* const at = pieces_[current_].room.bytes_at(used_);
  used_ += room_of(bytes);
  return at;
}

void* CpuOffload::bring(const void* host, std::size_t bytes) {
  void* const device = room_for(bytes);
  copier_.upload(*up_, device, host, bytes);
  return device;
}

void* CpuOffload::place(void* host, std::size_t bytes) {
  void* const device = room_for(bytes);
  returns_.push_back({host, device, bytes});
  return device;
}

void* CpuOffload::exchange(void* host, std::size_t bytes) {
  void* const device = place(host, bytes);
  copier_.upload(*up_, device, host, bytes);
  return device;
}

void CpuOffload::arrive() { context_.stream().wait(up_->record()); }

void CpuOffload::start_write_back() {
  down_->wait(context_.stream().record());
  for (const WriteBack& result : returns_) copier_.download(*down_, result.host, result.device, result.bytes);
  returns_.clear();
  UpdateSlot& piece = pieces_[current_];
  if (poison_) context_.runtime().fill(*down_, piece.room.data(), 0xFF, piece.room.bytes());
  piece.free = down_->record();
}

}  // namespace tessera::fsdp
