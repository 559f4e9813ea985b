// One communicator of one rank: its members, its operations, its traffic and its failure.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/core/failure_state.h"
#include "tessera/comm/core/operation.h"
#include "tessera/comm/core/traffic_counters.h"
#include "tessera/comm/registry.h"

namespace tessera::comm {

/// What all backends have in common. PolledGroup adds the operations that a progress engine advances.
class TESSERA_API GroupCore : public std::enable_shared_from_this<GroupCore> {
 public:
  GroupCore(const GroupCore&) = delete;
  GroupCore& operator=(const GroupCore&) = delete;
  virtual ~GroupCore();

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return static_cast<int>(members_.size()); }
  const std::vector<int>& members() const noexcept { return members_; }  ///< ranks of the backend's world
  int world_rank(int member) const noexcept { return members_[static_cast<std::size_t>(member)]; }
  int member_of(int world_rank) const noexcept;  ///< -1: not a member
  std::string rank_name(int member) const;       ///< in errors
  std::chrono::milliseconds timeout() const noexcept { return options_->communicator.timeout; }

  bool failed() const noexcept { return failure_.failed(); }
  void throw_if_failed() const {
    if (failed()) failure_.rethrow();
  }
  /// The first failure wins and ends all operations. `notify`: the other members don't know it yet.
  virtual void fail(Failure failure, bool notify) noexcept = 0;
  virtual void abort(std::string_view reason) noexcept;
  virtual void read_traffic(TrafficStats& stats) const { traffic_.read_into(stats); }
  /// Never destroys it: in a fork, its connections and shared memory are the parent's.
  void keep_forever();

 protected:
  /// A member's reply to a progress query; none: it has not replied in time.
  struct MemberProgress {
    int member;
    std::optional<std::uint64_t> called;  ///< the last collective that it has called
  };

  /// `options` are part of what the world's groups share, which thus outlives the operations. An incomplete group sets
  /// its members later.
  GroupCore(std::shared_ptr<const BackendOptions> options, int rank, std::vector<int> members);
  void set_members(int rank, std::vector<int> members);
  const BackendOptions& options() const noexcept { return *options_; }
  void log(LogLevel level, const std::string& text) const;

  /// An unused operation; all of a group have the same type T.
  template <class T, class... Args>
  T& acquire(Args&... args) {
    {
      const std::lock_guard lock(mutex_);
      if (free_ != nullptr) return static_cast<T&>(*std::exchange(free_, free_->next));
    }
    auto made = std::make_unique<T>(args...);
    const std::lock_guard lock(mutex_);
    operations_.push_back(std::move(made));
    return static_cast<T&>(*operations_.back());
  }

  /// Reports the first failure: to the other members if they don't know it, to this rank's other communicators, to the
  /// log.
  void publish_failure(bool notify) noexcept;
  virtual void send_failure(const Failure& failure) noexcept = 0;
  /// "all_reduce #12: not done within 5 s; REASON".
  static std::string timeout_message(const Operation& op, const std::string& reason);
  /// Why `op` is late: the members that have not called operation `wanted`, or `otherwise`.
  std::string describe_delay(const Operation& op, std::uint64_t wanted, std::span<const MemberProgress> replies,
                             std::string_view otherwise) const;

  mutable std::mutex mutex_;  ///< guards the free operations, and what a subclass adds
  FailureState failure_;
  TrafficCounters traffic_;

 private:
  friend class Operation;
  /// Does a bounded amount of work.
  virtual void advance() noexcept = 0;
  /// Waits until `op` has ended. False: not before `until`.
  virtual bool wait_for(Operation& op, Clock::time_point until) noexcept = 0;
  /// As WorkState::on_done().
  virtual void on_done(Operation& op, WorkCallback callback) = 0;
  /// Throws the failure, once the operation's memory is no longer written.
  [[noreturn]] virtual void throw_failure(const Operation& op);
  void recycle(Operation& op) noexcept {
    const std::lock_guard lock(mutex_);
    op.next = std::exchange(free_, &op);
  }

  const std::shared_ptr<const BackendOptions> options_;
  int rank_;
  std::vector<int> members_;
  Operation* free_ = nullptr;
  std::vector<std::unique_ptr<Operation>> operations_;
};

}  // namespace tessera::comm
