// The operations in flight of a communicator, and its stream.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backends/nccl/cuda_objects.h"
#include "tessera/base/log.h"
#include "tessera/comm/core/operation.h"

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

class StreamGroup;

class NcclOperation final : public Operation {
 public:
  NcclOperation(const NcclApi& api, StreamGroup& owner) : event(api), nccl_(owner) {}
  /// `title` names what is no operation of a caller, or a batch; a literal. `number`: 0 unless all members call it.
  /// `call` has copies of the counts of the _v forms, since NCCL may be called after the caller has given up.
  void reset(const OpDesc& what, std::uint64_t number, std::string_view title = {});

  /// Makes a device stream wait; the host only enqueues the wait.
  void wait_on(Stream& stream) override;
  std::string format() const override;

  CudaEvent event;
  bool recorded = false;  ///< the event was recorded for this operation; guarded by the group
  std::string signature;  ///< checked mode: what must be equal on all members

 private:
  StreamGroup& nccl_;
  std::string_view title_;
  std::vector<std::size_t> in_counts_;
  std::vector<std::size_t> out_counts_;
  std::string label_;  ///< the device may finish long after its caller has gone on
};

/// Streams that do not end after an abort, and what must not be freed because of them.
///
/// CUDA's functions that free memory wait until the whole device is idle, so they never return beside a stream that
/// waits for a peer that is gone. The objects of one rank ask any() before they free something. Thread-safe; the device
/// must be current.
class AbandonedStreams {
 public:
  /// `logger` may be null.
  explicit AbandonedStreams(std::shared_ptr<Logger> logger) : logger_(std::move(logger)) {}
  /// Leaks what has not ended.
  ~AbandonedStreams();
  AbandonedStreams(const AbandonedStreams&) = delete;
  AbandonedStreams& operator=(const AbandonedStreams&) = delete;

  /// `stream` has not ended after an abort. `for_good`: it can't be known when it ends, since NCCL may still add work.
  void add(std::shared_ptr<OperationStream> stream, bool for_good) noexcept;
  /// Destroys `stream` once no stream is abandoned.
  void keep(std::shared_ptr<OperationStream> stream) noexcept;
  /// Whether a stream is abandoned, so that a free could wait without end.
  bool any() noexcept;

 private:
  bool any_locked() noexcept;

  const std::shared_ptr<Logger> logger_;
  std::mutex mutex_;
  bool for_good_ = false;
  std::vector<std::shared_ptr<OperationStream>> abandoned_, kept_;
};

}  // namespace tessera::comm::nccl
