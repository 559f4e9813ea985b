#include "backends/nccl/cuda_objects.h"

#include <string>

#include "tessera/base/error.h"

namespace tessera::comm::nccl {

void check_cuda(const NcclApi& api, cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return;
  api.cudaGetLastError();
  throw BackendError("nccl: " + std::string(what) + ": " + api.cudaGetErrorString(error));
}

DeviceGuard::DeviceGuard(const NcclApi& api, int device) : api_(api) {
  int current = -1;
  check_cuda(api, api.cudaGetDevice(&current), "cudaGetDevice");
  if (current == device) return;
  check_cuda(api, api.cudaSetDevice(device), "cudaSetDevice " + std::to_string(device));
  before_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (before_ >= 0) api_.cudaSetDevice(before_);
}

CudaStream::CudaStream(const NcclApi& api) : api_(api) {
  check_cuda(api, api.cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
}

CudaEvent::CudaEvent(const NcclApi& api) : api_(api) {
  check_cuda(api, api.cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
}

bool CudaEvent::reached(cudaError_t& error) const noexcept {
  error = api_.cudaEventQuery(event_);
  if (error == cudaErrorNotReady) {
    api_.cudaGetLastError();
    error = cudaSuccess;
    return false;
  }
  return true;
}

PinnedScratch::PinnedScratch(const NcclApi& api, std::size_t bytes) : api_(api) {
  check_cuda(api, api.cudaMalloc(&device_, bytes), "cudaMalloc");
  const cudaError_t error = api.cudaHostAlloc(&host_, bytes, cudaHostAllocDefault);
  if (error != cudaSuccess) api.cudaFree(device_);  // the destructor does not run if the constructor throws
  check_cuda(api, error, "cudaHostAlloc");
}

PinnedScratch::~PinnedScratch() {
  api_.cudaFree(device_);
  api_.cudaFreeHost(host_);
}

DeviceBlock::DeviceBlock(const NcclApi& api, std::size_t bytes) : api_(api), bytes_(bytes) {
  check_cuda(api, api.cudaMalloc(&data_, bytes), "cudaMalloc");
}

}  // namespace tessera::comm::nccl
