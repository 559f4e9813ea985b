// One communicator of NCCL: its creation, use and end.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>

#include "backends/nccl/calls.h"
#include "backends/nccl/cuda_objects.h"
#include "tessera/comm/pollable.h"

namespace tessera::comm::nccl {

/// The communicator is a blocking one where the library has ncclCommRevoke: a call returns when NCCL has enqueued the
/// work or made the communicator, which the first operations and the creation do once the other ranks call them. Such
/// calls belong in CallThreads. An abort frees a blocking communicator at once, also while a call is inside it, so
/// where nothing ends such a call it is a non-blocking one, whose calls each start a thread of NCCL's. Thread-safe.
class NcclComm {
 public:
  enum class Health : std::uint8_t { ok, suspect, failed };
  /// For so long an error is suspect: within it the control channel names a dead rank.
  static constexpr std::chrono::milliseconds kVerdictTime{500};

  /// `init` or `begin_copy` and `finish_copy` create the communicator.
  NcclComm(const NcclApi& api, int device);
  /// Aborts a communicator that was not destroyed. Waits for the abort as wait_aborted() does.
  ~NcclComm();

  /// Before the creation: gathers between windows use the device's copy engines and none of its multiprocessors, where
  /// the library and the headers of this build have that (2.28).
  void gather_by_copy_engines() noexcept;

  // Calls that may block; at most one is made at a time, the next one waits for it. They throw NcclError, also in a
  // communicator that has ended. The device must be the current one.
  void init(const ncclUniqueId& id, int rank, int size);
  /// Makes this the duplicate of a communicator, with the same ranks, which shares its channels, buffers and threads:
  /// if one of them is aborted, the others must be too. All ranks call it. finish_copy() follows when `original` has
  /// completed the call.
  void begin_copy(ncclComm_t original, int rank);
  void finish_copy();
  void destroy();
  /// Calls `use` with the handle, and waits until NCCL has completed what it called.
  template <class Use>
  void use(const Use& use) {
    const Guard guard(*this);
    use(guard.handle());
    wait_complete("a communicator");
  }

  // At any time:
  /// Between its creation and its end.
  bool usable() const noexcept;
  /// Suspect: NCCL has reported, for a short time, an error that a dead peer may cause. `problem` describes a failure.
  Health health(std::string& problem) noexcept;
  /// "nccl: FUNCTION: NCCL's text".
  std::string format(const NcclError& error) const;
  /// Returns at once: a separate thread, which may never end, aborts the communicator. A call in progress is given a
  /// short time to end by itself. If it does not end, not even revoked, the communicator is leaked.
  void abort() noexcept;
  /// The same for communicators that share resources: none is freed while a call is inside another one.
  static void abort(std::span<NcclComm* const> family) noexcept;
  /// False: an abort has not completed in time, or the communicator is leaked.
  bool wait_aborted();
  /// After an abort: waits until the device can no longer write memory of the work before `event`. False: not in time.
  bool wait_stopped(const CudaEvent& event);

 private:
  struct Shared;
  class Guard {
   public:
    explicit Guard(NcclComm& comm);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;
    ncclComm_t handle() const noexcept { return handle_; }

   private:
    Shared& shared_;
    ncclComm_t handle_ = nullptr;
  };

  /// Ends the use. False: nothing has to be aborted.
  bool end() noexcept;
  static void run_abort(const NcclApi& api, int device, Shared& shared,
                        std::span<const std::shared_ptr<Shared>> family) noexcept;
  void wait_complete(const char* function);
  void set_ready();
  bool wait_aborted(Clock::time_point until);
  /// Deadline for waits on the device: once it has passed, no caller waits again.
  Clock::time_point stop_deadline() const noexcept;

  const NcclApi& api_;
  const int device_;
  const std::shared_ptr<Shared> shared_;  ///< with the thread that aborts
  std::atomic<bool> does_not_stop_{false};
};

}  // namespace tessera::comm::nccl
