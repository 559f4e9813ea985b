#include "tessera/nn/host_access.h"

#include <algorithm>
#include <utility>

namespace tessera::nn {

PinnedBufferCache::~PinnedBufferCache() {
  for (const Block& block : blocks_) {
    block.free.wait();
    runtime_.free_host(block.data, block.bytes);
  }
}

PinnedBufferCache::Block PinnedBufferCache::acquire(std::size_t bytes) {
  const auto idle = [](const Block& block) { return block.free.done(); };
  std::erase_if(blocks_, [&](const Block& block) {
    const bool dropped = block.bytes > kKept && idle(block);
    if (dropped) {
      runtime_.wait_for_host_events();  // to free or allocate pinned memory may wait for all streams
      runtime_.free_host(block.data, block.bytes);
    }
    return dropped;
  });
  blocks_.reserve(blocks_.size() + 1);  // for the block's return
  const auto found = std::find_if(blocks_.begin(), blocks_.end(),
                                  [&](const Block& block) { return block.bytes >= bytes && idle(block); });
  if (found == blocks_.end()) {
    runtime_.wait_for_host_events();
    return {runtime_.allocate_host(bytes), bytes, {}};
  }
  Block block = std::move(*found);
  blocks_.erase(found);
  return block;
}

void upload(Context& context, void* to, std::size_t bytes, const std::function<void(void*)>& write) {
  DeviceRuntime& runtime = context.runtime();
  context.refuse_in_capture("an upload", "every replay would use the recorded data");
  if (runtime.host_accessible()) return write(to);
  if (runtime.device().type == DeviceType::meta || bytes == 0) return;
  PinnedBufferCache::Lease block(context.staging(), bytes);
  write(block->data);
  runtime.copy(context.stream(), CopyDirection::host_to_device, to, block->data, bytes);
  block->free = context.stream().record();
}

void download(Context& context, const void* from, std::size_t bytes, const std::function<void(const void*)>& read) {
  DeviceRuntime& runtime = context.runtime();
  context.refuse_in_capture("a download", "recorded work has not run yet");
  if (runtime.host_accessible()) {
    context.stream().synchronize();
    return read(from);
  }
  PinnedBufferCache::Lease block(context.staging(), bytes);
  runtime.copy(context.stream(), CopyDirection::device_to_host, block->data, from, bytes);
  context.stream().synchronize();
  read(block->data);
}

}  // namespace tessera::nn
