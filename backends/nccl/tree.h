// Kernels of our own, where this module was built with a CUDA compiler: what the vendor lacks.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/nccl/tree_element.h"

namespace tessera::nccl {

struct TreeKernels {
  /// Appends: the tree over all pieces, into `work.out`.
  cudaError_t (*reduce)(const TreeWork& work, cudaStream_t stream);
  /// Appends: *to = value, on the device.
  cudaError_t (*store)(double* to, double value, cudaStream_t stream);
};

/// Null where this build has none.
const TreeKernels* tree_kernels();

}  // namespace tessera::nccl
