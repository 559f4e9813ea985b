// Replaces src/nn/kernels/cuda in builds of communication only.
#include "tessera/base/cuda/runtime.h"

namespace tessera::base::cuda {

const void* find_of_nn(std::string_view) noexcept { return nullptr; }
std::string libraries_of_nn() noexcept { return {}; }

}  // namespace tessera::base::cuda
