// One communicator of one rank: the NCCL communicator, its stream, and the operations in flight.
//
// All operations of a communicator run on one stream of its own, in call order. NCCL communicators are non-blocking: a
// call may still be in progress when it returns, and no other call is allowed meanwhile. So each call here waits until
// NCCL has enqueued it, which needs no peer, except when connections are made for the first time. All such waits end at
// the operation's deadline.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backends/nccl/calls.h"
#include "backends/nccl/comm_aborter.h"
#include "backends/nccl/cuda_objects.h"
#include "backends/nccl/operation.h"
#include "backends/nccl/runtime.h"
#include "tessera/comm/core/call_verifier.h"
#include "tessera/comm/core/group_core.h"

namespace tessera::comm::nccl {

class NcclGroup final : public GroupCore {
 public:
  NcclGroup(std::shared_ptr<NcclRuntime> runtime, std::uint64_t id);
  ~NcclGroup() override;
  /// Creates this group from all ranks of the world. Collective; throws Timeout, BackendError, PeerLost, Aborted.
  void connect(const ncclUniqueId& id);
  /// Returns the part of this group with the same color; null for a negative one. Collective.
  std::shared_ptr<NcclGroup> split(int color, int key);
  /// Accepts no more operations and waits for those in flight.
  void close() noexcept;

  /// The next operation runs after the current work of `stream`.
  void come_after(cudaStream_t stream);
  Work start(const OpDesc& call);
  Work start_batch(std::span<const OpDesc> parts);

  std::uint64_t id() const noexcept { return id_; }
  const Capabilities& capabilities() const noexcept { return capabilities_; }
  NcclRuntime& runtime() const noexcept { return *runtime_; }
  /// The number of the last operation that all members call.
  ControlPeerMonitor::LastCall called() const noexcept { return called_; }

  /// Returns null if NCCL can't register, which is logged, or if the communicator has failed.
  void* register_memory(void* data, std::size_t bytes);
  void deregister_memory(void* handle) noexcept;

  // Any thread:
  /// Removes completed operations; fails if NCCL has failed.
  void retire_completed() noexcept;
  /// Does the same and checks deadlines.
  void check_health() noexcept;
  /// Returns at once: a separate thread aborts the NCCL communicator.
  void fail(Failure failure, bool notify) noexcept override;
  void on_peer_lost(int world_rank) noexcept;
  void on_departure(int world_rank, std::uint64_t called) noexcept;
  void on_op_signature(const ControlMessage& message) noexcept;
  /// First waits, bounded, until the device can no longer write the operation's memory.
  [[noreturn]] void throw_failure(const Operation& op) override;

 private:
  enum class Health : std::uint8_t { ok, suspect, failed };
  using Issue = std::function<ncclResult_t()>;

  void advance() noexcept override { retire_completed(); }
  bool wait_for(Operation& op, Clock::time_point until) noexcept override;

  // The caller's thread:
  NcclOperation& prepare(const OpDesc& call);
  /// Calls `issue` and waits until NCCL has enqueued it; then does the same with `and_then`, if present.
  Work launch(NcclOperation& op, const Issue& issue, const Issue& and_then = {});
  void issue_locked(const Issue& issue);
  void wait_enqueued(NcclOperation& op, bool all);
  void wait_ready(Clock::time_point until);
  void enter_members(int rank, std::vector<int> members);
  void create_resources();
  Work start_tree(const OpDesc& call);
  void* workspace(std::size_t bytes);
  std::vector<int> gather_world_ranks();
  Work start_internal(const Issue& issue);
  LaunchTarget target() const;
  void count(const OpDesc& call);
  void check_device(const OpDesc& call) const;
  void send_signature(const NcclOperation& op);

  // Any thread:
  /// ncclInProgress, success, or the error of NCCL's threads.
  ncclResult_t state_locked() const noexcept;
  void retire_locked(std::vector<NcclOperation*>& completed, Failure& failure) noexcept;
  Health health_locked(Failure& failure) noexcept;
  void find_departure_locked(Failure& failure) const;
  bool verified_locked(const NcclOperation& op) const;
  std::string vendor_text_locked(const NcclError& error) const;
  void release_operations(std::span<NcclOperation* const> completed) noexcept;
  void fail_with_timeout(const Operation& op) noexcept;
  void send_failure(const Failure& failure) noexcept override;
  /// Deadline for waits on the device of a failed communicator: once it has passed, no caller waits again.
  Clock::time_point stop_deadline() const noexcept;

  const std::shared_ptr<NcclRuntime> runtime_;
  const NcclApi& api_;
  const std::uint64_t id_;
  Capabilities capabilities_;
  const std::shared_ptr<std::atomic<std::uint64_t>> called_ = std::make_shared<std::atomic<std::uint64_t>>(0);
  std::uint64_t splits_ = 0;
  std::unique_ptr<PinnedScratch> scratch_;                ///< outlives the stream, as do ...
  std::vector<std::unique_ptr<DeviceBlock>> workspaces_;  ///< ... these: the last is used, operations may use others
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<CudaEvent> before_;  ///< the next operation runs after it, if ...
  bool comes_after_ = false;

  // Guarded by mutex_, as is every use of comm_:
  ncclComm_t comm_ = nullptr;
  std::deque<NcclOperation*> in_flight_;  ///< in the order of the stream
  CallVerifier verifier_{0};
  std::vector<std::optional<std::uint64_t>> closed_;  ///< by member: what it had called when it closed
  std::optional<Clock::time_point> suspect_since_;    ///< NCCL reports an error that a dead peer may cause
  std::shared_ptr<CommAborter> aborter_;
  std::atomic<bool> does_not_stop_{false};
  std::mutex timeout_mutex_;
};

}  // namespace tessera::comm::nccl
