// Replaces tree_kernels.cu in builds without a CUDA compiler.
#include "backends/nccl/tree_kernels.h"

namespace tessera::comm::nccl {

const TreeKernels* tree_kernels() { return nullptr; }

}  // namespace tessera::comm::nccl
