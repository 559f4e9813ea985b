// A communicator of one rank whose operations run on a stream: their launch, completion and failure.
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

#include "backends/nccl/nccl_comm.h"
#include "backends/nccl/operation.h"
#include "backends/nccl/operation_stream.h"
#include "backends/nccl/runtime.h"
#include "tessera/comm/completion_poller.h"
#include "tessera/comm/core/call_verifier.h"
#include "tessera/comm/core/group_core.h"

namespace tessera::comm::nccl {

/// NcclGroup adds its creation, its end and what its operations call.
class StreamGroup : public GroupCore {
 public:
  std::uint64_t id() const noexcept { return id_; }
  NcclRuntime& runtime() const noexcept { return *runtime_; }
  /// The number of the last operation that all members call.
  ControlPeerMonitor::LastCall called() const noexcept { return called_; }

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
  void on_group_key(const ControlMessage& message) noexcept;
  /// First waits, bounded, until the device can no longer write the operation's memory.
  [[noreturn]] void throw_failure(const Operation& op) override;

 protected:
  using Issue = std::function<void()>;

  StreamGroup(std::shared_ptr<NcclRuntime> runtime, std::uint64_t id);
  void enter_members(int rank, std::vector<int> members);
  /// The members have yet to say that they create this group, by ControlMessage::group_key.
  void expect_members() { has_begun_.assign(members().size(), false); }
  /// Waits until no operation is in flight.
  void drain() noexcept;

  // The caller's thread:
  std::uint64_t next_number() noexcept { return called_->fetch_add(1) + 1; }
  /// Calls `issue` and waits until NCCL has enqueued it; then does the same with `and_then`, if present.
  Work launch(NcclOperation& op, const Issue& issue, const Issue& and_then = {});
  /// Calls `issue` under the lock, unless the communicator has failed. Throws BackendError.
  void call_nccl(const Issue& issue);
  /// Waits until NCCL's calls are complete. Throws BackendError, Timeout, and a failure that a peer has reported.
  void wait_ready(Clock::time_point until);
  /// The key of this group, which its first member sends. Throws Timeout, and a failure that a peer has reported.
  ncclUniqueId wait_for_key(Clock::time_point until);
  /// The members that have not begun to create this group: ": rank 2 has not called it".
  std::string describe_absent() const;

  const std::shared_ptr<NcclRuntime> runtime_;
  const NcclApi& api_;
  CompletionPoller completions_;
  std::unique_ptr<OperationStream> stream_;  ///< created once comm_ is ready
  NcclComm comm_;                            ///< guarded by mutex_; it ends before the memory that its kernels use

 private:
  void advance() noexcept override { retire_completed(); }
  bool wait_for(Operation& op, Clock::time_point until) noexcept override;
  void on_done(Operation& op, WorkCallback callback) override { completions_.add(op, std::move(callback)); }

  void wait_enqueued(NcclOperation& op, bool all);
  void send_signature(const NcclOperation& op);
  void retire_locked(std::vector<NcclOperation*>& completed, Failure& failure) noexcept;
  NcclComm::Health health_locked(Failure& failure) noexcept;
  void find_departure_locked(Failure& failure) const;
  bool verified_locked(const NcclOperation& op) const;
  std::string prefix_locked() const;
  void release_operations(std::span<NcclOperation* const> ended) noexcept;
  void fail_with_timeout(const Operation& op) noexcept;
  void send_failure(const Failure& failure) noexcept override;

  const std::uint64_t id_;
  const std::shared_ptr<std::atomic<std::uint64_t>> called_ = std::make_shared<std::atomic<std::uint64_t>>(0);
  std::mutex timeout_mutex_;

  // Guarded by mutex_:
  std::deque<NcclOperation*> in_flight_;  ///< in the order of the stream
  CallVerifier verifier_{0};
  std::string key_;                                   ///< hexadecimal; empty: it has not come
  std::vector<bool> has_begun_;                       ///< by member: to create this group
  std::vector<std::optional<std::uint64_t>> closed_;  ///< by member: what it had called when it closed
};

}  // namespace tessera::comm::nccl
