// One communicator of NCCL: its creation, state and end.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "backends/nccl/calls.h"
#include "backends/nccl/cuda_objects.h"
#include "tessera/comm/pollable.h"

namespace tessera::comm::nccl {

/// The communicator is non-blocking: a call may still be in progress when it returns, and no other call is allowed
/// until state() is ncclSuccess. Used under a lock of the group, except where it says otherwise.
class NcclComm {
 public:
  enum class Health : std::uint8_t { ok, suspect, failed };

  /// `init` of this one or `split` of another one creates the communicator.
  NcclComm(const NcclApi& api, int device);
  /// Aborts a communicator that was not destroyed. Waits for the abort as wait_aborted() does.
  ~NcclComm();

  /// Null before its creation, and after destroy() and abort().
  ncclComm_t get() const noexcept { return comm_; }

  // Calls that may still be in progress when they return, and throw NcclError. The device must be the current one.
  void init(const ncclUniqueId& id, int rank, int size);
  void split(int color, int key, NcclComm& child);
  void finalize() { check(api_.ncclCommFinalize(comm_), "ncclCommFinalize"); }

  void destroy() noexcept { api_.ncclCommDestroy(std::exchange(comm_, nullptr)); }
  /// ncclInProgress, success, or the error of NCCL's threads.
  ncclResult_t state() const noexcept;
  /// Suspect: NCCL has reported, for a short time, an error that a dead peer may cause. `problem` describes a failure.
  Health health(std::string& problem) noexcept;
  /// "nccl: FUNCTION: NCCL's text".
  std::string format(const NcclError& error) const;
  /// Returns once the calls are complete; unlocks `lock` between polls. False: the communicator was aborted. Throws
  /// BackendError, Timeout.
  bool wait_ready(std::unique_lock<std::mutex>& lock, Clock::time_point until);

  /// Returns at once: a separate thread, which may never end, aborts the communicator.
  void abort() noexcept;

  // Any thread, without the lock:
  /// False: an abort has not completed in time.
  bool wait_aborted() { return wait_aborted(stop_deadline()); }
  /// After an abort: waits until the device can no longer write memory of the work before `event`. False: not in time.
  bool wait_stopped(const CudaEvent& event);

 private:
  struct Abort;

  bool wait_aborted(Clock::time_point until);
  /// Deadline for waits on the device: once it has passed, no caller waits again.
  Clock::time_point stop_deadline() const noexcept;

  const NcclApi& api_;
  const int device_;
  ncclConfig_t config_;
  ncclComm_t comm_ = nullptr;
  std::optional<Clock::time_point> suspect_since_;
  const std::shared_ptr<Abort> abort_;  ///< shared with the thread that aborts
  std::atomic<bool> does_not_stop_{false};
};

}  // namespace tessera::comm::nccl
