// A communicator of one rank whose operations run on a stream: their launch, completion and failure.
//
// All operations of a communicator run on one stream of its own, in call order. One of the rank's CallThreads calls
// NCCL, and the caller waits until NCCL has enqueued the operation, which needs no peer, except when connections are
// made for the first time. All such waits end at the operation's deadline.
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
#include "backends/nccl/runtime.h"
#include "tessera/comm/completion_poller.h"
#include "tessera/comm/core/group_core.h"

namespace tessera::comm::nccl {

class StreamGroup;

/// A communicator and its duplicates on one rank. They share what NCCL needs for a communicator, so they fail together.
/// Thread-safe.
class Family {
 public:
  void add(StreamGroup& group);
  void remove(StreamGroup& group) noexcept;
  /// Makes `first`, which may not have been added yet, and all others fail. `notify`: of the first one's members.
  void fail(StreamGroup& first, const Failure& failure, bool notify) noexcept;

 private:
  std::mutex mutex_;
  std::vector<StreamGroup*> groups_;
};

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
  /// Its family fails, too. Returns at once: separate threads abort the NCCL communicators.
  void fail(Failure failure, bool notify) noexcept override { family_->fail(*this, failure, notify); }
  void on_peer_lost(int world_rank) noexcept;
  /// Whether the member has closed its communicator. All that it sent before has come.
  bool has_closed(int member) const noexcept;
  void on_departure(int world_rank, std::uint64_t called) noexcept;
  void on_op_signature(const ControlMessage& message) noexcept;
  void on_group_key(const ControlMessage& message) noexcept;
  virtual void on_symmetric_vote(const ControlMessage& message) noexcept = 0;
  /// First waits, bounded, until the device can no longer write the memory of any operation.
  [[noreturn]] void throw_failure(const Operation& op) override;

 protected:
  using Issue = std::function<void(ncclComm_t)>;

  /// Null: a family of its own.
  StreamGroup(std::shared_ptr<NcclRuntime> runtime, std::uint64_t id, std::shared_ptr<Family> family = nullptr);
  ~StreamGroup() override;
  void enter_members(int rank, std::vector<int> members);
  /// The members have yet to say that they create this group, by ControlMessage::group_key.
  void expect_members() { has_begun_.assign(members().size(), false); }
  /// Waits until no operation is in flight.
  void drain() noexcept;
  /// After a failure: waits, bounded, until its stream has ended. False: it has not, and what it may
  /// use is kept from then on.
  bool wait_stopped() noexcept;

  // The caller's thread:
  std::uint64_t next_number() noexcept { return called_->fetch_add(1) + 1; }
  /// Starts `op` by calling `issue` with the communicator in one of the CallThreads, and `and_then`, if present, when
  /// NCCL has enqueued that; waits until both have returned. What they refer to must live as long as the group and
  /// `op`.
  Work launch(NcclOperation& op, Issue issue, Issue and_then = {});
  /// Runs `call` in one of the CallThreads and waits until it has returned. Throws BackendError, Timeout, and the
  /// group's failure; `call` may return later then, so what it refers to must live as long as the group.
  void run_call(std::function<void()> call, Clock::time_point until);
  /// The key of this group, which its first member sends. Throws Timeout, and a failure that a peer has reported.
  ncclUniqueId wait_for_key(Clock::time_point until);
  /// The members that have not begun to create this group: ": rank 2 has not called it".
  std::string describe_absent() const;

  const std::shared_ptr<NcclRuntime> runtime_;
  const NcclApi& api_;
  CompletionPoller completions_;
  std::shared_ptr<OperationStream> stream_;  ///< created once comm_ is ready
  NcclComm comm_;                            ///< it ends before the memory that its kernels use
  const std::shared_ptr<Family> family_;     ///< entered once the group is created, left before its end

 private:
  friend class Family;
  void advance() noexcept override { retire_completed(); }
  bool wait_for(Operation& op, Clock::time_point until) noexcept override;
  void on_done(Operation& op, WorkCallback callback) override { completions_.add(op, std::move(callback)); }

  std::shared_ptr<const CallThreads::Call> start_call(std::function<void()> call);
  void enqueue(NcclOperation& op, const Issue& issue, const Issue& and_then);
  std::string error_of(const CallThreads::Call& call) noexcept;
  void send_signature(const NcclOperation& op);
  void retire_locked(std::vector<NcclOperation*>& completed, Failure& failure) noexcept;
  NcclComm::Health health_locked(Failure& failure) noexcept;
  void find_departure_locked(Failure& failure) const;
  bool verified_locked(const NcclOperation& op) const;
  std::string prefix_locked() const;
  bool mark_failed(const Failure& failure, std::vector<NcclOperation*>& ended) noexcept;
  void release_operations(std::span<NcclOperation* const> ended) noexcept;
  void fail_with_timeout(const Operation& op) noexcept;
  void send_failure(const Failure& failure) noexcept override;

  const std::uint64_t id_;
  const std::shared_ptr<std::atomic<std::uint64_t>> called_ = std::make_shared<std::atomic<std::uint64_t>>(0);
  std::mutex timeout_mutex_;
  std::once_flag end_recorded_;  ///< of the stream

  // Guarded by mutex_:
  std::deque<NcclOperation*> in_flight_;  ///< in the order of the stream
  CallVerifier verifier_{0};
  std::string key_;                                   ///< hexadecimal; empty: it has not come
  std::vector<bool> has_begun_;                       ///< by member: to create this group
  std::vector<std::optional<std::uint64_t>> closed_;  ///< by member: what it had called when it closed
};

}  // namespace tessera::comm::nccl
