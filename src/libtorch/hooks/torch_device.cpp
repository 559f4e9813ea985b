#include "tessera/libtorch/hooks/torch_device.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/version.h>
#if TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR >= 211  // whose streams tell their handle
#define TESSERA_TORCH_HAS_DEVICES
#include <c10/core/CachingDeviceAllocator.h>
#endif

#include <string>
#include <string_view>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::libtorch {
namespace {

at::Device device_of(const torch::nn::Module& model) {
  std::string first;
  at::Device device = at::kCPU;
  const auto visit = [&](const auto& items) {
    for (const auto& item : items) {
      const at::Tensor& tensor = item.value();
      if (!tensor.defined() || tensor.is_meta()) continue;
      if (first.empty()) {
        first = item.key();
        device = tensor.device();
      } else if (tensor.device() != device) {
        throw base::InvalidUsage(item.key() + " is on " + tensor.device().str() + ", and " + first + " on " +
                                 device.str() + "; move the model to one device before its engine is made");
      }
    }
  };
  visit(model.named_parameters());
  visit(model.named_buffers());
  if (!device.is_cpu() && !device.is_cuda())
    throw base::Unsupported(first + " is on " + device.str() + "; the engine supports tensors of cpu and cuda");
  return device;
}

void* current_stream_of(const at::Device& device) {
  if (device.is_cpu()) return nullptr;
#ifdef TESSERA_TORCH_HAS_DEVICES
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
#else
  throw base::Unsupported("tensors of " + device.str() + " need libtorch 2.11 or newer; this is " TORCH_VERSION);
#endif
}

/// Where Torch can, reading a tensor without memory throws `why`; older ones throw or crash.
template <class Storage>
void explain(Storage& storage, std::string_view why) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    if (why.empty())
      storage.clear_data_ptr_access_error_msg_();
    else
      storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(why) + ": its data is not allocated");
  }
}

}  // namespace

TorchDevice::TorchDevice(const torch::nn::Module& model)
    : device_(device_of(model)), stream_(current_stream_of(device_)) {}

nn::ContextOptions TorchDevice::context_options(std::shared_ptr<base::MemoryTracker> memory_tracker,
                                                std::function<std::unique_ptr<base::Stream>()> make_stream) const {
  nn::ContextOptions options{.threads = at::get_num_threads(),
                             .memory_tracker = std::move(memory_tracker),
                             .make_stream = std::move(make_stream)};
  if (device_.is_cpu()) return options;
  options.runtime = base::open_device({base::DeviceType::cuda, device_.index()});
  options.make_stream = [runtime = options.runtime, stream = stream_, first = true]() mutable {
    return std::exchange(first, false) ? runtime->borrow_stream(stream) : runtime->make_stream();
  };
  return options;
}

void TorchDevice::require_current_stream() const {
  if (current_stream_of(device_) != stream_)
    throw base::InvalidUsage("forward: Torch's current stream of " + device_.str() +
                             " is not the one that was current when the engine was made, on which it computes; make "
                             "the engine and call the model under the same stream");
}

void TorchDevice::count_memory([[maybe_unused]] base::MemoryTracker& memory_tracker) {
  if (device_.is_cpu()) return;
#ifdef TESSERA_TORCH_HAS_DEVICES
  c10::DeviceAllocator& allocator = *c10::getDeviceAllocator(device_.type());
  const auto all = allocator.getDeviceStats(device_.index()).allocated_bytes[0];  // of all its pools
  counted_ = {};
  {
    const base::TrackedBytes peak(memory_tracker, base::MemoryCategory::activation, static_cast<std::size_t>(all.peak));
  }
  counted_ = {memory_tracker, base::MemoryCategory::activation, static_cast<std::size_t>(all.current)};
  allocator.resetPeakStats(device_.index());
#endif
}

TensorMemory::TensorMemory(const std::string& name, const at::Tensor& tensor)
    : storage_(tensor.storage()), device_(tensor.device()) {
  if (!tensor.is_leaf())
    throw base::InvalidUsage(name +
                             " is computed from a tensor with gradients, which autograd would train; register "
                             "tensor.detach().clone() instead");
  if (tensor.layout() != at::kStrided || !tensor.is_contiguous() || tensor.storage_offset() != 0 ||
      storage_.nbytes() != static_cast<std::size_t>(tensor.numel()) * tensor.element_size())
    throw base::InvalidUsage(
        name + " is not contiguous, or a part of another tensor; register tensor.detach().clone() instead");
}

TensorMemory::~TensorMemory() {
  if (initial_) set(std::move(initial_));
}

bool TensorMemory::is_of(const at::Tensor& tensor) const {
  return tensor.storage().unsafeGetStorageImpl() == storage_.unsafeGetStorageImpl();
}

void TensorMemory::move_to(void* data, std::string_view why) {
  at::DataPtr before = set({data, device_});
  if (!std::exchange(moved_, true)) initial_ = std::move(before);
  data_ = data;
  explain(*storage_.unsafeGetStorageImpl(), data == nullptr ? why : "");
}

}  // namespace tessera::libtorch
