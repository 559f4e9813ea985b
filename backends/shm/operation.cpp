#include "backends/shm/operation.h"

#include <algorithm>

#include "tessera/comm/kernels/reduce.h"

namespace tessera::comm::shm {

void ShmOperation::reset(const OpDesc& what, std::uint64_t number, bool all_inputs) {
  Operation::reset(what, number);
  layout.reset(what, all_inputs);
  stage = Stage::queued;
  eager = everyone = stages_in = cma_in = copied_in = stages_out = cma_out = copied_out = any_staged = any_awaits =
      streaming = false;
  arrived = 0;
  fingerprint = staged = reduced = 0;
}

std::uint64_t ShmOperation::rounds_for(std::size_t count) const {
  const std::uint64_t elements = round_bytes / size_of(call.in.dtype);
  return (count + elements - 1) / elements;
}

std::uint64_t ShmOperation::rounds_sent() const {
  std::size_t most = 0;
  for (int j = 0; j < layout.ranks(); ++j)
    if (j != layout.rank()) most = std::max(most, layout.sent_slice(j).count);
  return rounds_for(most);
}

void ShmOperation::copy_sent(std::byte* to, StoreChoice& stores) const {
  const std::size_t size = size_of(call.in.dtype);
  const auto* in = static_cast<const std::byte*>(call.in.data);
  const auto copy = [&](std::size_t begin, std::size_t end) {
    if (begin >= end) return;
    const std::size_t bytes = (end - begin) * size;
    stores.write(StoreChoice::Target::copy, call.in.bytes(), bytes,
                 [&](bool streams) { copy_bytes(to + begin * size, in + begin * size, bytes, streams); });
  };
  if (!layout.sends_input()) return;
  if (layout.shares_input()) return copy(0, call.in.count);
  const Slice own = layout.sent_slice(layout.rank());
  copy(0, own.offset);
  copy(own.offset + own.count, call.in.count);
}

}  // namespace tessera::comm::shm
