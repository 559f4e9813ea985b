// The CUDA DeviceRuntime: memory, streams, events and copies, over the vendor's runtime library.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string_view>

#include "tessera/base/device_module.h"
#include "tessera/base/device_runtime.h"
#include "tessera/base/device_stream.h"

namespace tessera::base::cuda {

/// Throws BackendError "cuda: WHAT: the vendor's text" if `error` is one; SystemError if memory is exhausted.
void check(cudaError_t error, std::string_view what);

/// Finds tables of the layers above in this device, by name.
using Find = const void* (*)(std::string_view interface) noexcept;

/// Loads all kernels of the module that `kernel`, a kernel of this library, belongs to: those of one source file.
/// Throws BackendError.
void load_kernels(const void* kernel);

/// The handle of a stream, for one piece of work. Throws InvalidUsage if it is not a stream of such a device.
cudaStream_t native(Stream& stream);

/// Returns why no device can be used, and the devices found. Loads nothing and creates no context.
DeviceProbe probe() noexcept;

/// Opens device `index`. Throws InvalidUsage if it doesn't exist.
std::shared_ptr<DeviceRuntime> open(int index, Find find);

}  // namespace tessera::base::cuda
