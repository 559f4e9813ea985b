#include "tessera/base/cuda/device_guard.h"

#include <cuda.h>

namespace tessera::base::cuda {
namespace {

bool has_context(int index) noexcept {
  static const auto get_device = driver_function<decltype(&cuDeviceGet)>("cuDeviceGet", 2000);
  static const auto get_state =
      driver_function<decltype(&cuDevicePrimaryCtxGetState)>("cuDevicePrimaryCtxGetState", 7000);
  CUdevice device = 0;
  unsigned flags = 0;
  int active = 0;
  return get_device != nullptr && get_state != nullptr && get_device(&device, index) == CUDA_SUCCESS &&
         get_state(device, &flags, &active) == CUDA_SUCCESS && active != 0;
}

}  // namespace

DeviceGuard::DeviceGuard(int index) noexcept {
  int current = -1;
  const bool known = cudaGetDevice(&current) == cudaSuccess;
  // A thread that has chosen no device has device 0, whose context a call creates if need be.
  if (known && current == index) return;
  if (cudaSetDevice(index) == cudaSuccess && known) previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0 && has_context(previous_)) cudaSetDevice(previous_);
}

}  // namespace tessera::base::cuda
