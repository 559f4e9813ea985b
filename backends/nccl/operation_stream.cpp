#include "backends/nccl/operation_stream.h"

#include <algorithm>

namespace tessera::comm::nccl {

OperationStream::OperationStream(const NcclApi& api, std::size_t scratch_bytes)
    : api_(api), scratch_(api, scratch_bytes), stream_(api), end_(api), before_(api) {
  check_cuda(api, api.cudaMemsetAsync(scratch_.device(), 0, scratch_bytes, stream_.get()), "cudaMemsetAsync");
}

void* OperationStream::workspace(std::size_t bytes) {
  const std::size_t now = workspaces_.empty() ? 0 : workspaces_.back()->bytes();
  if (workspaces_.empty() || now < bytes)
    workspaces_.push_back(std::make_unique<DeviceBlock>(api_, std::max(bytes, 2 * now)));
  return workspaces_.back()->data();
}

void OperationStream::come_after(cudaStream_t stream) {
  before_.record(stream);
  comes_after_ = true;
}

void OperationStream::record_end() noexcept {
  if (api_.cudaEventRecord(end_.get(), stream_.get()) != cudaSuccess) api_.cudaGetLastError();  // end() will tell
}

void OperationStream::begin_operation() {
  if (comes_after_) before_.make_stream_wait(stream_.get());
  comes_after_ = false;
}

}  // namespace tessera::comm::nccl
