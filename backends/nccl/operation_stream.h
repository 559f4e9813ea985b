// The stream of a communicator, and the memory that its operations use.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "backends/nccl/cuda_objects.h"

namespace tessera::comm::nccl {

/// All operations of a communicator run on this stream, in call order. Used by the thread that calls them.
class OperationStream {
 public:
  /// Created on the current device. `scratch_bytes`: size of the scratch memory, which is zero on the device.
  OperationStream(const NcclApi& api, std::size_t scratch_bytes);

  cudaStream_t get() const noexcept { return stream_.get(); }
  const PinnedScratch& scratch() const noexcept { return scratch_; }
  /// Returns device memory for an operation; it stays valid for operations in flight when a later one needs more.
  void* workspace(std::size_t bytes);

  /// The next operation runs after the current work of `stream`.
  void come_after(cudaStream_t stream);
  /// The stream waits for what the next operation runs after.
  void begin_operation();

  /// What has been enqueued so far is what end() is reached after.
  void record_end() noexcept;
  const CudaEvent& end() const noexcept { return end_; }

 private:
  const NcclApi& api_;
  PinnedScratch scratch_;                                 ///< outlives the stream, as do ...
  std::vector<std::unique_ptr<DeviceBlock>> workspaces_;  ///< ... these: the last is used, operations may use others
  CudaStream stream_;
  CudaEvent end_;
  CudaEvent before_;  ///< the next operation runs after it, if ...
  bool comes_after_ = false;
};

}  // namespace tessera::comm::nccl
