#include "c10d/tensor_device.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <string>

#include "c10d/torch_version.h"
#include "tessera/base/error.h"

namespace tessera::c10d_backend {
namespace {

std::shared_ptr<base::DeviceRuntime> open(const c10::Device& device) {
  try {
    return base::open_device(device_of(device));
  } catch (const base::Error& error) {
    C10_THROW_ERROR(NotImplementedError, "tessera: tensors of " + device.str() + " can't be used: " + error.what());
  }
}

}  // namespace

base::Device device_of(const c10::Device& device) {
  if (device.is_cpu()) return {};
#if TESSERA_TORCH >= 211  // whose streams tell their handle
  if (device.is_cuda()) return {base::DeviceType::cuda, device.index()};
#else
  if (device.is_cuda())
    C10_THROW_ERROR(NotImplementedError,
                    "tessera: tensors of " + device.str() + " need PyTorch 2.11 or newer; use ones in host memory");
#endif
  C10_THROW_ERROR(NotImplementedError,
                  "tessera: tensors of " + device.str() + " are not supported; use ones in host memory");
}

c10::Device common_device(const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) return c10::kCPU;
  const c10::Device device = tensors.front().device();
  for (const at::Tensor& tensor : tensors)
    if (tensor.device() != device)
      C10_THROW_ERROR(ValueError, "tessera: the tensors of a call must be on one device, not on " + device.str() +
                                      " and " + tensor.device().str());
  return device;
}

TensorDevice::TensorDevice(const c10::Device& device)
    : device_(device),
      runtime_(open(device)),
      results_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, true)) {}

c10::Stream TensorDevice::current() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_); }

std::unique_ptr<base::Stream> TensorDevice::borrow(const c10::Stream& stream) const {
#if TESSERA_TORCH >= 211
  return runtime_->borrow_stream(stream.native_handle());
#else
  C10_THROW_ERROR(NotImplementedError, "tessera: " + stream.device().str() + " needs PyTorch 2.11 or newer");
#endif
}

}  // namespace tessera::c10d_backend
