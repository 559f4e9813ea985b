#include "tools/bench/memory_traffic.h"

#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::tools {

using base::CopyDirection;
using comm::MemoryKind;

namespace {

bool takes(const comm::Communicator& world, MemoryKind kind) {
  const std::vector<MemoryKind>& kinds = world.capabilities().memory;
  return std::find(kinds.begin(), kinds.end(), kind) != kinds.end();
}

}  // namespace

BenchMemory::BenchMemory(comm::Communicator& world, base::DeviceRuntime& device, bool communicator_memory)
    : world_(world),
      runtime_(device),
      communicator_memory_(communicator_memory),
      pool_(world.memory_tracker()),
      stream_(device.make_stream()) {
  if (on_host() && !takes(world, MemoryKind::host))
    throw base::InvalidUsage(fmt::format("backend {} supports device memory only; use --device cuda", world.backend()));
}

std::size_t BenchMemory::larger_than_caches() const {
  constexpr std::size_t kEnough = std::size_t{512} << 20;  // ten times the second-level cache of the largest GPU
  const std::size_t all = runtime_.properties().memory_bytes;
  return all == 0 ? kEnough / 8 : std::min(kEnough, all / 64);
}

/// Device memory that is not the communicator's is staged through host memory on backends of the host.
base::Buffer BenchMemory::allocate_there(std::size_t bytes) {
  const MemoryKind kind = on_host() ? MemoryKind::host : MemoryKind::device;
  if (communicator_memory_ && takes(world_, kind))
    return world_.allocate(bytes, kind, base::MemoryCategory::communication);
  if (on_host()) return pool_.allocate(bytes, base::MemoryCategory::communication);
  return {runtime_.allocate(bytes), bytes,
          [&runtime = runtime_](void* data, std::size_t size) { runtime.free(data, size); }};
}

BenchMemory::Block BenchMemory::allocate(std::size_t bytes) {
  Block block{.memory = allocate_there(bytes), .copy = {}};
  if (!on_host()) block.copy = pool_.allocate(bytes, base::MemoryCategory::other);
  return block;
}

void BenchMemory::put(Block& block, std::size_t bytes) {
  if (on_host()) return;
  runtime_.copy(*stream_, CopyDirection::host_to_device, block.memory.data(), block.copy.data(), bytes);
  stream_->synchronize();
}

void BenchMemory::get(Block& block, std::size_t bytes) {
  if (on_host()) return;
  runtime_.copy(*stream_, CopyDirection::device_to_host, block.copy.data(), block.memory.data(), bytes);
  stream_->synchronize();
}

void BenchMemory::move(const MemoryTraffic& traffic) {
  // A copy loads and stores each byte once; adding n pieces loads n and stores one.
  const std::size_t bytes =
      traffic.copied + (traffic.combined * (static_cast<std::size_t>(traffic.sources) + 1) + 1) / 2;
  if (bytes == 0) return;
  for (base::Buffer* buffer : {&from_, &to_})
    if (!*buffer || buffer->bytes() < bytes)
      *buffer = {runtime_.allocate(bytes), bytes,
                 [&runtime = runtime_](void* data, std::size_t size) { runtime.free(data, size); }};
  runtime_.copy(*stream_, CopyDirection::device_to_device, to_.data(), from_.data(), bytes);
  stream_->synchronize();
}

}  // namespace tessera::tools
