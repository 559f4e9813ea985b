// A device other than the host whose tensors a process group moves, and PyTorch's streams of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>
#include <vector>

#include "tessera/base/device_runtime.h"

namespace tessera::c10d_backend {

/// The library's name of a tensor's device. Throws PyTorch's error for kinds of devices that the library does not have.
base::Device device_of(const c10::Device& device);

/// The one device of all these tensors; the host for none. Throws PyTorch's ValueError if they are on several.
c10::Device common_device(const std::vector<at::Tensor>& tensors);

/// Needs no header of the device's vendor: PyTorch shows its streams by their handles, and the library's module of the
/// device works on these. Any thread.
class TensorDevice {
 public:
  /// Throws PyTorch's NotImplementedError with the reason if the package carries no module for such devices, or if this
  /// one can't be used.
  explicit TensorDevice(const c10::Device& device);

  const c10::Device& device() const { return device_; }
  const std::shared_ptr<base::DeviceRuntime>& runtime() const { return runtime_; }
  /// PyTorch's current stream of the calling thread, as the library uses it for one call.
  std::unique_ptr<base::Stream> current_stream() const { return borrow(current()); }
  c10::Stream current() const;
  /// The stream on which results become valid, which waits for operations, so that the program's need not.
  const c10::Stream& results() const { return results_; }
  std::unique_ptr<base::Stream> borrow(const c10::Stream& stream) const;

 private:
  const c10::Device device_;
  const std::shared_ptr<base::DeviceRuntime> runtime_;
  const c10::Stream results_;
};

}  // namespace tessera::c10d_backend
