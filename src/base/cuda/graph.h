// Captures a stream's work as a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "tessera/base/device_runtime.h"

namespace tessera::base::cuda {

void begin_capture(cudaStream_t stream);
std::unique_ptr<Graph> end_capture(cudaStream_t stream);

}  // namespace tessera::base::cuda
