// One communicator of one rank: its members, its operations, its traffic, its failure, and in checked mode what its
// members call.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/base_names.h"
#include "tessera/comm/core/operation.h"
#include "tessera/comm/failure.h"
#include "tessera/comm/registry.h"
#include "tessera/comm/traffic.h"

namespace tessera::comm {

/// The bytes that one rank has sent on one communicator, by member and kind of operation. Any thread reads them; one
/// thread at a time adds.
class TrafficCounters {
 public:
  explicit TrafficCounters(std::size_t members) : bytes_(members * kOpKinds) {}

  std::atomic<std::uint64_t>& counter(OpKind kind, int member) noexcept {
    return bytes_[static_cast<std::size_t>(member) * kOpKinds + static_cast<std::size_t>(kind)];
  }
  void add(OpKind kind, int member, std::uint64_t bytes) noexcept { add(counter(kind, member), bytes); }
  /// Adds to a counter that no other thread changes meanwhile.
  static void add(std::atomic<std::uint64_t>& counter, std::uint64_t bytes) noexcept {
    counter.store(counter.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
  }
  /// Adds the counters to `stats`.
  void read_into(TrafficStats& stats) const {
    for (std::size_t i = 0; i < bytes_.size(); ++i) {
      const std::uint64_t bytes = bytes_[i].load(std::memory_order_relaxed);
      stats.by_kind[i % kOpKinds].bytes_sent += bytes;
      stats.bytes_to_peer[i / kOpKinds] += bytes;
    }
  }

 private:
  std::vector<std::atomic<std::uint64_t>> bytes_;
};

/// The first failure of a communicator on one rank. Any thread reads it; those that set it are ordered by a lock of the
/// group.
class FailureState {
 public:
  bool failed() const noexcept { return failed_.load(); }
  /// Keeps the first failure and ignores later ones. True: it is the first.
  bool set(Failure failure) noexcept {
    if (failed_.load()) return false;
    failure_ = std::move(failure);
    failed_.store(true);
    return true;
  }
  /// Does not change any more once failed() is true.
  const Failure& get() const noexcept { return failure_; }
  [[noreturn]] void rethrow() const { throw_failure(failure_); }

 private:
  std::atomic<bool> failed_{false};
  Failure failure_;
};

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

/// Checked mode: the members compare what they call as the same operation. Collects all their signatures by operation.
/// Used under a lock of the group.
class TESSERA_API CallVerifier {
 public:
  explicit CallVerifier(std::size_t members) : members_(members) {}

  /// What a signature is compared by: messages truncate the text.
  static std::uint64_t fingerprint(std::string_view signature) noexcept;

  /// A member calls operation `sequence`. True: it is the last of all members, so that verified() or mismatch() is
  /// final.
  bool submit(int member, std::uint64_t sequence, std::string signature, std::uint64_t fingerprint);
  /// Whether all members have made the same call.
  bool verified(std::uint64_t sequence) const;
  /// "operation #3 differs between the ranks: rank 0: ...; rank 1: ...".
  std::string mismatch(std::uint64_t sequence, const std::function<std::string(int)>& rank_name) const;
  /// The same table with other rows.
  static std::string format_mismatch(std::uint64_t sequence, int members, const std::function<std::string(int)>& row);
  void erase(std::uint64_t sequence) { calls_.erase(sequence); }
  void clear() noexcept { calls_.clear(); }

 private:
  struct Calls {
    std::vector<std::string> signatures;  ///< by member
    std::vector<std::uint64_t> fingerprints;
    std::size_t submitted = 0;
  };
  std::size_t members_;
  std::map<std::uint64_t, Calls> calls_;  ///< by sequence
};

/// The communicator over a group of this type: the functions of all backends whose groups are GroupCores.
template <class Group>
class GroupCommunicator : public Communicator {
 public:
  GroupCommunicator(std::shared_ptr<Group> group, CommunicatorOptions options, bool is_world = false)
      : Communicator(group->rank(), group->size(), std::move(options)), group_(std::move(group)), is_world_(is_world) {}
  ~GroupCommunicator() override {
    if (is_parents()) {
      group_->keep_forever();
      return;
    }
    group_->close();
    if constexpr (requires { group_->runtime().leave(); })
      if (is_world_) group_->runtime().leave();
  }
  const Capabilities& capabilities() const noexcept final { return group_->capabilities(); }

 protected:
  const std::shared_ptr<Group> group_;

 private:
  Work do_start(const OpDesc& call) final { return group_->start(call); }
  Work do_batch(std::span<const OpDesc> parts) final { return group_->start_batch(parts); }
  void do_abort(std::string_view reason) noexcept final { group_->abort(reason); }
  void do_traffic(TrafficStats& snapshot) const final { group_->read_traffic(snapshot); }

  const bool is_world_;
};

}  // namespace tessera::comm
