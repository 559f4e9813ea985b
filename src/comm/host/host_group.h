// One communicator of one rank over a transport: the order of its operations, and when they fail.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "tessera/comm/core/group_core.h"
#include "tessera/comm/core/polled_group.h"
#include "tessera/comm/host/host_runtime.h"
#include "tessera/comm/host/schedule_cache.h"
#include "tessera/comm/host/schedule_executor.h"

namespace tessera::comm::host {

/// Counts the messages to or from each member, by tag. Thread-safe: a receive from any rank is counted when its message
/// has come.
class MessageNumbers {
 public:
  explicit MessageNumbers(std::size_t members) : untagged_(members) {}
  std::uint64_t next(int member, int tag) {
    const std::lock_guard lock(mutex_);
    return ++of(member, tag);
  }
  /// What next() would return.
  std::uint64_t peek(int member, int tag) {
    const std::lock_guard lock(mutex_);
    return of(member, tag) + 1;
  }
  /// Counts the message `number` if it is still the next one.
  bool take(int member, int tag, std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    std::uint64_t& last = of(member, tag);
    if (last + 1 != number) return false;
    last = number;
    return true;
  }

 private:
  std::uint64_t& of(int member, int tag) {
    return tag == 0 ? untagged_[static_cast<std::size_t>(member)] : tagged_[{member, tag}];
  }
  std::mutex mutex_;
  std::vector<std::uint64_t> untagged_;
  std::map<std::pair<int, int>, std::uint64_t> tagged_;
};

class HostGroup final : public PolledGroup {
 public:
  HostGroup(std::shared_ptr<HostRuntime> runtime, std::uint32_t id, int rank, std::vector<int> members);
  ~HostGroup() override;
  /// Before open(): sets the communicator for native operations. Null: the library has no more of them.
  void use_native(std::unique_ptr<NativeCommunicator> group) noexcept;
  void open();
  /// No more operations follow; waits for those in flight.
  void close() noexcept;

  /// The operation of a call, for launch(). `internal`: of the library itself, regardless of TESSERA_ALGO.
  ScheduleExecutor& prepare(const OpDesc& call, bool internal);
  Work start(const OpDesc& call) { return launch(prepare(call, false)); }
  Work start_batch(std::span<const OpDesc> parts, bool internal = false);
  Buffer allocate_scratch(std::size_t bytes) const;
  /// Collective: creates another native group of the same ranks. `copy` must stay in place until the Work is done.
  Work start_copy(std::unique_ptr<NativeCommunicator>& copy);
  std::string_view last_algorithm() const noexcept { return last_algorithm_; }

  HostRuntime& runtime() noexcept { return *runtime_; }
  const Capabilities& capabilities() const noexcept { return runtime_->capabilities(); }
  const std::shared_ptr<HostRuntime>& shared_runtime() const noexcept { return runtime_; }
  std::uint32_t id() const noexcept { return id_; }
  ControlPeerMonitor::LastCall called() const noexcept { return called_; }
  NativeCommunicator* native() const noexcept { return native_.get(); }  ///< null: only schedules

  // Under the engine's lock:
  /// The counter of bytes that `op` sends to a member; null if they are not counted.
  std::atomic<std::uint64_t>* counter(const ScheduleExecutor& op, int member) noexcept;
  bool begin_submitted() noexcept;
  /// Begins receives from any rank whose message has come. True: one has begun.
  bool find_senders() noexcept;
  /// Completes an operation whose steps are done.
  void complete_if_done(ScheduleExecutor& op) noexcept;
  /// Native operations start in call order on all ranks; in checked mode, only once all ranks are known to have made
  /// the same call. True: it starts now; not called again after that.
  bool begin_native_in_order(const ScheduleExecutor& op) noexcept;
  void count_native(const ScheduleExecutor& op) noexcept;
  void check_health() noexcept;
  void on_op_signature(int member, const ControlMessage& message) noexcept;

 private:
  void look_for_failure() noexcept;
  ScheduleExecutor& prepare_message(const OpDesc& call, bool internal);
  bool find_sender(ScheduleExecutor& op) noexcept;
  ScheduleExecutor& prepare_collective(const OpDesc& call, std::shared_ptr<const Schedule> schedule);
  void complete(ScheduleExecutor& op, Operation::State state) noexcept;
  void send_failure(const Failure& failure) noexcept override;
  void fail_operations(bool first) noexcept override;
  void send_signature(ScheduleExecutor& op) noexcept;
  std::string problem_of(const ScheduleExecutor& op) const;
  void fail_with_timeout(const ScheduleExecutor& op) noexcept;
  std::string describe_replies(const ScheduleExecutor& op,
                               std::span<const std::optional<std::uint64_t>> by_world_rank) const;

  const std::shared_ptr<HostRuntime> runtime_;
  const std::uint32_t id_;
  const std::shared_ptr<std::atomic<std::uint64_t>> called_ = std::make_shared<std::atomic<std::uint64_t>>(0);

  // The caller's thread:
  ScheduleCache schedules_;
  std::string_view last_algorithm_ = kMessageAlgorithm;  ///< algorithm of the last call
  std::uint64_t native_called_ = 0;

  MessageNumbers messages_to_;
  MessageNumbers messages_from_;

  // Under the engine's lock:
  std::vector<ScheduleExecutor*> running_;
  std::vector<ScheduleExecutor*> await_sender_;  ///< those of running_ that receive from any rank, and have none yet
  CallVerifier verifier_;
  std::unique_ptr<NativeCommunicator> native_;
  std::uint64_t native_begun_ = 0;
};

}  // namespace tessera::comm::host
