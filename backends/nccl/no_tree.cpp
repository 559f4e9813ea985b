// In the place of tree.cu where there is no CUDA compiler.
#include "backends/nccl/tree.h"

namespace tessera::nccl {

const TreeKernels* tree_kernels() { return nullptr; }

}  // namespace tessera::nccl
