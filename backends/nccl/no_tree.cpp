// In the place of tree_kernels.cu where there is no CUDA compiler.
#include "backends/nccl/tree_kernels.h"

namespace tessera::comm::nccl {

const TreeKernels* tree_kernels() { return nullptr; }

}  // namespace tessera::comm::nccl
