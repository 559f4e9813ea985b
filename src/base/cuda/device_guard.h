// The driver's functions that the runtime library lacks, and the device that the vendor's functions use for the calling
// thread.
#pragma once

#include <cuda_runtime_api.h>

#if CUDART_VERSION < 12050
#error "The CUDA device needs CUDA 12.5 or newer, for cudaGetDriverEntryPointByVersion"
#endif

namespace tessera::base::cuda {

/// A function of the driver, as of CUDA version `version` (12040 for 12.4); null if this driver has none. `Function` is
/// its pointer type.
template <class Function>
Function driver_function(const char* name, unsigned version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status{};
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &status);
  cudaGetLastError();
  const bool there = error == cudaSuccess && status == cudaDriverEntryPointSuccess;
  return there ? reinterpret_cast<Function>(found) : nullptr;
}

/// Makes a device current for the calling thread while the guard lives. Then the device before it is current again, if
/// the process has a context there: to choose a device that nothing else uses would create one, half a gigabyte of that
/// device's memory. So a thread that had not chosen a device stays on this one.
///
/// Errors are left to the calls that follow.
class DeviceGuard {
 public:
  explicit DeviceGuard(int index) noexcept;
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;  ///< -1: the device was current
};

}  // namespace tessera::base::cuda
