// The device of a libtorch model, and Torch's stream and memory there.
#pragma once

#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>

#include "tessera/base/memory_tracker.h"
#include "tessera/fsdp/nn_model.h"

namespace tessera::libtorch {

/// An engine computes on the stream that is Torch's current one when this object is made. Used by the threads of the
/// model's forward and backward.
class TorchDevice {
 public:
  /// The one device of the parameters and buffers of `model`, without those of the meta device; the host if there is no
  /// other. Throws Unsupported for a kind of device that the library or this Torch doesn't support.
  explicit TorchDevice(const torch::nn::Module& model);
  const at::Device& device() const { return device_; }
  /// Resources of a context on this device: on a GPU its first stream is Torch's. `make_stream` makes those of the
  /// host; empty: the host's own.
  nn::ContextOptions context_options(std::shared_ptr<base::MemoryTracker> memory_tracker,
                                     std::function<std::unique_ptr<base::Stream>()> make_stream) const;
  /// Throws InvalidUsage if Torch's current stream of the calling thread is another one by now.
  void require_current_stream() const;
  /// Counts the memory that Torch's allocator of this device has given out since the last call as activations, at its
  /// peak and now. On the host Torch counts none.
  void count_memory(base::MemoryTracker& memory_tracker);

 private:
  const at::Device device_;
  void* const stream_;  ///< the vendor's handle; null on the host
  base::TrackedBytes counted_;
};

}  // namespace tessera::libtorch
