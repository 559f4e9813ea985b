// The CUDA device as base sees it: memory, streams, events and copies, over the vendor's runtime library.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <string_view>

#include "tessera/base/device_module.h"
#include "tessera/base/device_runtime.h"
#include "tessera/base/device_stream.h"

namespace tessera::base::cuda {

/// Throws BackendError "cuda: WHAT: the vendor's text" where `error` is one; SystemError where memory is short.
void check(cudaError_t error, std::string_view what);

/// What the layers above put into this device, by name.
using Find = const void* (*)(std::string_view interface) noexcept;

/// Throws InvalidUsage where it is no stream of such a device.
cudaStream_t native(Stream& stream);

/// Why no device can be used, and what there is. Loads nothing and makes no context.
DeviceProbe probe() noexcept;

/// Device `index`. Throws InvalidUsage where there is no such one.
std::shared_ptr<DeviceRuntime> open(int index, Find find);

}  // namespace tessera::base::cuda
