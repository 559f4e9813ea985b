#include "backends/nccl/cuda_objects.h"

#include <string>

#include "tessera/base/error.h"

namespace tessera::comm::nccl {
namespace {

/// Whether the device's primary context exists. True if the driver can't tell.
bool has_context(const NcclApi& api, int device) noexcept {
  unsigned flags = 0;
  int active = 0;
  return api.cuDevicePrimaryCtxGetState == nullptr || api.cuDevicePrimaryCtxGetState(device, &flags, &active) != 0 ||
         active != 0;
}

}  // namespace

void check_cuda(const NcclApi& api, cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return;
  api.cudaGetLastError();
  throw BackendError("nccl: " + std::string(what) + ": " + api.cudaGetErrorString(error));
}

DeviceGuard::DeviceGuard(const NcclApi& api, int device) : api_(api) {
  check_cuda(api, enter(device), "making device " + std::to_string(device) + " current");
}

DeviceGuard::DeviceGuard(const NcclApi& api, int device, std::nothrow_t) noexcept : api_(api) {
  if (enter(device) != cudaSuccess) api.cudaGetLastError();
}

cudaError_t DeviceGuard::enter(int device) noexcept {
  int current = -1;
  if (const cudaError_t error = api_.cudaGetDevice(&current); error != cudaSuccess || current == device) return error;
  const cudaError_t error = api_.cudaSetDevice(device);
  if (error == cudaSuccess) before_ = current;
  return error;
}

DeviceGuard::~DeviceGuard() {
  if (before_ >= 0 && has_context(api_, before_)) api_.cudaSetDevice(before_);
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
