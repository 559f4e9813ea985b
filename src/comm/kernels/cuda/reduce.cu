// comm's interface of the CUDA device: reductions over the memory of several ranks.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

#include "tessera/base/cuda/runtime.h"
#include "tessera/base/device_stream.h"
#include "tessera/base/error.h"
#include "tessera/comm/kernels/reduce.h"
#include "tessera/comm/kernels/reduce_element-inl.h"

namespace tessera::comm {
namespace {

constexpr unsigned kThreads = 256;
constexpr std::size_t kMaxBlocks = 4096;

/// The kernel's argument: passed by value, since the host's arrays are gone when it runs.
struct Sources {
  ReduceOp op;
  int count;
  void* out;
  std::size_t elements;
  const void* data[DeviceReduceKernels::kMaxSources];
  double factors[DeviceReduceKernels::kMaxSources];
};

template <class T>
__global__ void sum_kernel(const __grid_constant__ Sources sources) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < sources.elements;
       i += step) {
    const auto leaf = [&](int k) {
      return sum_leaf(sources.op, static_cast<const T*>(sources.data[k])[i], sources.factors[k]);
    };
    static_cast<T*>(sources.out)[i] = sum_element<T>(sources.op, leaf, sources.count);
  }
}

void check(cudaError_t error) {
  if (error != cudaSuccess) throw BackendError("cuda: reduction: " + std::string(cudaGetErrorString(error)));
}

void append(Stream& stream, const DeviceReduceArgs& sum) {
  if (sum.count == 0) return;
  auto* const own = dynamic_cast<DeviceStream*>(&stream);
  if (own == nullptr || sum.source_count < 1 || sum.source_count > DeviceReduceKernels::kMaxSources)
    throw InvalidUsage("cuda: reduction of " + std::to_string(sum.source_count) + " sources on a stream of " +
                       name_of(stream.device()) + "; needs 1 to " + std::to_string(DeviceReduceKernels::kMaxSources) +
                       " sources and a cuda stream");
  Sources sources{};
  sources.op = sum.op;
  sources.count = sum.source_count;
  sources.out = sum.out;
  sources.elements = sum.count;
  std::copy_n(sum.sources, sum.source_count, sources.data);
  std::copy_n(sum.factors, sum.source_count, sources.factors);
  own->prepare_launch();
  const auto blocks = static_cast<unsigned>(std::min((sum.count + kThreads - 1) / kThreads, kMaxBlocks));
  with_dtype(sum.dtype, [&](auto zero) {
    sum_kernel<decltype(zero)><<<blocks, kThreads, 0, static_cast<cudaStream_t>(own->native())>>>(sources);
  });
  check(cudaGetLastError());
}

/// CUDA loads a kernel at its first launch and may synchronize the whole device for it, including streams that wait for
/// the very call that this reduction belongs to. So all kernels are loaded beforehand.
bool load_all() {
  bool loaded = true;
  for (const DType dtype : base::kDTypes)
    with_dtype(dtype, [&](auto zero) {
      cudaFuncAttributes attributes{};
      loaded &= cudaFuncGetAttributes(&attributes, sum_kernel<decltype(zero)>) == cudaSuccess;
    });
  cudaGetLastError();
  return loaded;
}

const DeviceReduceKernels kSums{append};

}  // namespace
}  // namespace tessera::comm

namespace tessera::base::cuda {

const void* find_of_comm(std::string_view interface) noexcept {
  return interface == comm::DeviceReduceKernels::kInterface && comm::load_all() ? &comm::kSums : nullptr;
}

}  // namespace tessera::base::cuda
