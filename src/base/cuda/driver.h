// The driver's functions that the runtime library lacks.
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

}  // namespace tessera::base::cuda
