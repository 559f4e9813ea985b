// Data between the host and a context's device: the only way for the host to touch what a tensor holds.
#pragma once

#include <functional>
#include <vector>

#include "tessera/nn/context.h"

namespace tessera::nn {

/// Calls `write` with host memory of `bytes` bytes, which it fills at once; work appended to the compute stream from
/// here on finds them at `to`. Where the host shares the device's memory, `write` gets `to` itself: earlier work that
/// uses it must have been done. On meta nothing is called.
TESSERA_API void upload(Context& context, void* to, std::size_t bytes, const std::function<void(void*)>& write);

/// Waits for the compute stream and calls `read` with host memory that holds what is at `from`; valid during the call.
/// Throws InvalidUsage on meta.
TESSERA_API void download(Context& context, const void* from, std::size_t bytes,
                          const std::function<void(const void*)>& read);

/// Host memory that copies pass through, kept for the next one. One per context.
class PinnedBufferCache {
 public:
  explicit PinnedBufferCache(DeviceRuntime& runtime) : runtime_(runtime) {}
  ~PinnedBufferCache();
  PinnedBufferCache(const PinnedBufferCache&) = delete;
  PinnedBufferCache& operator=(const PinnedBufferCache&) = delete;

  struct Block {
    void* data = nullptr;
    std::size_t bytes = 0;
    Event free;  ///< reached when the copy that used it last is done
  };
  Block take(std::size_t bytes);
  void give(Block block) { blocks_.push_back(std::move(block)); }

 private:
  static constexpr std::size_t kKept = std::size_t{64} << 20;  // a larger block goes as soon as it is idle
  DeviceRuntime& runtime_;
  std::vector<Block> blocks_;
};

}  // namespace tessera::nn
