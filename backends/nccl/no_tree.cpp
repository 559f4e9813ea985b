// Replaces tree_kernels.cu in builds without a CUDA compiler.
#include "backends/nccl/tree_kernels.h"

namespace tessera::nccl {

const TreeKernels* tree_kernels() { return nullptr; }

}  // namespace tessera::nccl
