#include "tessera/comm/host_exchange.h"

#include <algorithm>
#include <cstring>

namespace tessera::comm {

bool finished(Work& work) {
  if (!work.done()) return false;
  work.wait();
  return true;
}

bool HostExchange::takes_host_memory() const {
  const std::vector<MemoryKind>& kinds = communicator_.capabilities().memory;
  return std::find(kinds.begin(), kinds.end(), MemoryKind::host) != kinds.end();
}

void HostExchange::exchange(ConstView in, View out, const Exchange& run) {
  if (!takes_host_memory()) return exchange_through_device(in, out, run);
  run(in, out).wait();
}

/// Kept from call to call: making device memory stops the device.
void HostExchange::make_room(std::size_t bytes) {
  if (stream_ == nullptr) stream_ = device_.make_stream();
  if (room_ && room_.bytes() >= bytes) return;
  base::DeviceRuntime& device = device_;
  pinned_ = {device.allocate_host(bytes), bytes, [&device](void* p, std::size_t n) { device.free_host(p, n); }};
  room_ = {device.allocate(bytes), bytes, [&device](void* p, std::size_t n) { device.free(p, n); }};
}

void HostExchange::exchange_through_device(ConstView in, View out, const Exchange& run) {
  const std::size_t second = (in.bytes() + base::kAlignment - 1) / base::kAlignment * base::kAlignment;
  make_room(second + std::max<std::size_t>(1, out.bytes()));
  if (in.bytes() > 0) std::memcpy(pinned_.data(), in.data, in.bytes());
  device_.copy(*stream_, base::CopyDirection::host_to_device, room_.data(), pinned_.data(), in.bytes());
  stream_->synchronize();
  std::byte* const result = room_.bytes_at(second);
  run({room_.data(), in.count, in.dtype, device_.device()}, {result, out.count, out.dtype, device_.device()}).wait();
  device_.copy(*stream_, base::CopyDirection::device_to_host, pinned_.bytes_at(second), result, out.bytes());
  stream_->synchronize();
  if (out.bytes() > 0) std::memcpy(out.data, pinned_.bytes_at(second), out.bytes());
}

}  // namespace tessera::comm
