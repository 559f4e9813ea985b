// Entry point through which the CUDA device finds nn's kernels.
#include "tessera/base/cuda/layers.h"
#include "tessera/nn/kernels/cuda/matmul_table.cuh"

namespace tessera::base::cuda {

const void* find_of_nn(std::string_view interface) noexcept {
  static const nn::KernelFactory kKernels{[](const nn::KernelResources& resources) {
    return nn::cuda::make_cuda_kernels(resources.memory, nn::cuda::make_products(resources));
  }};
  return interface == nn::KernelFactory::kInterface ? &kKernels : nullptr;
}

}  // namespace tessera::base::cuda
