// Streams that do not end after an abort, and what must not be freed because of them.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "backends/nccl/operation_stream.h"
#include "tessera/base/log.h"

namespace tessera::comm::nccl {

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
