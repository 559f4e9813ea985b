// The device of a libtorch model, Torch's stream and memory there, and the memory of one tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/base/memory_tracker.h"
#include "tessera/fsdp/nn_model.h"

namespace tessera::libtorch {

/// The memory of one tensor. An engine moves it from place to place: the tensor's, that of its views, and of what
/// autograd has saved. Keeps the values from the tensor's construction until they are released.
class TensorMemory {
 public:
  /// Throws InvalidUsage by `name` for one that is not contiguous, no leaf of autograd, or does not fill its storage. A
  /// view that does, such as zeros(4).view({2, 2}), moves with the tensor that it is a view of.
  TensorMemory(const std::string& name, const at::Tensor& tensor);
  /// Gives the values from the construction back, if they are still here: the engine has not been made.
  ~TensorMemory();
  TensorMemory(const TensorMemory&) = delete;
  TensorMemory& operator=(const TensorMemory&) = delete;

  const void* identity() const { return storage_.unsafeGetStorageImpl(); }
  /// Whether the tensor still has this memory: set_data() and Module::to() give it another.
  bool is_of(const at::Tensor& tensor) const;
  void* data() const { return data_; }
  const void* initial() const { return initial_.get(); }
  void release_initial() { initial_.clear(); }
  /// Null: the tensor has no memory, because of `why`.
  void move_to(void* data, std::string_view why);

 private:
  at::DataPtr set(at::DataPtr data) { return storage_.unsafeGetStorageImpl()->set_data_ptr(std::move(data)); }

  at::Storage storage_;
  const at::Device device_;
  at::DataPtr initial_;
  bool moved_ = false;
  void* data_ = nullptr;
};

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
