#include <algorithm>

#include "backends/nccl/tree_kernels.h"

namespace tessera::comm::nccl {
namespace {

constexpr unsigned kThreads = 256;
constexpr std::size_t kMaxBlocks = 4096;

template <class T>
__global__ void reduce_kernel(TreeReduceArgs work) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < work.count; i += step)
    tree_element<T>(work, i);
}

__global__ void store_kernel(double* to, double value) { *to = value; }

cudaError_t load() {
  cudaFuncAttributes attributes{};
  cudaError_t result = cudaFuncGetAttributes(&attributes, store_kernel);
  for (const base::DType dtype : base::kDTypes)
    base::with_dtype(dtype, [&](auto zero) {
      if (result == cudaSuccess) result = cudaFuncGetAttributes(&attributes, reduce_kernel<decltype(zero)>);
    });
  return result;
}

cudaError_t reduce(const TreeReduceArgs& work, cudaStream_t stream) {
  const std::size_t blocks = std::min((work.count + kThreads - 1) / kThreads, kMaxBlocks);
  if (blocks == 0) return cudaSuccess;
  base::with_dtype(work.dtype, [&](auto zero) {
    reduce_kernel<decltype(zero)><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(work);
  });
  return cudaGetLastError();
}

cudaError_t store(double* to, double value, cudaStream_t stream) {
  store_kernel<<<1, 1, 0, stream>>>(to, value);
  return cudaGetLastError();
}

}  // namespace

const TreeKernels* tree_kernels() {
  static constexpr TreeKernels kKernels{load, reduce, store};
  return &kKernels;
}

}  // namespace tessera::comm::nccl
