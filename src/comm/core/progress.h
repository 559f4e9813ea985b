// The progress engine has no fixed owner: it is a function under a try-lock that serves all communicators of one rank.
// A waiting thread drives it; the progress thread drives it only while no thread waits.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/base_names.h"
#include "tessera/comm/pollable.h"

namespace tessera::comm {

/// What a group needs to be in the list of those that a poll looks at. A rank may have thousands of communicators, most
/// of which are idle. Idle groups are in no list, and cost a poll nothing.
class TESSERA_API ActiveGroup {
 public:
  ActiveGroup() = default;
  ActiveGroup(const ActiveGroup&) = delete;
  ActiveGroup& operator=(const ActiveGroup&) = delete;
  bool any_in_flight() const noexcept { return in_flight_.load() != 0; }

 protected:
  ~ActiveGroup() = default;
  std::atomic<std::uint32_t> in_flight_{0};  ///< operations, and those whose callbacks have yet to return

 private:
  friend class ActiveGroups;
  std::atomic<bool> listed_{false};  ///< is in the list, or on the way to it
  ActiveGroup* next_ = nullptr;
  std::uint32_t idle_polls_ = 0;  ///< in a row
};

/// The groups with operations in flight. A group stays for some polls without any, so that a rank which calls one
/// operation after another does not add and remove its group each time.
class TESSERA_API ActiveGroups {
 public:
  static constexpr std::uint32_t kIdlePolls = 100;

  /// Any thread, after it has counted an operation in flight: later polls look at the group.
  void activate(ActiveGroup& group) noexcept {
    // Sequentially consistent, as the removal in update(): one of the two sees what the other has written.
    if (group.listed_.load() || group.listed_.exchange(true)) return;
    // So is this, with the load in add_activated(): a thread publishes its sleep and then polls, the caller activates
    // the group and then reads whether that thread sleeps (Doorbell).
    ActiveGroup* first = activated_.load(std::memory_order_relaxed);
    do {
      group.next_ = first;
    } while (!activated_.compare_exchange_weak(first, &group));
  }

  // Under the engine's lock:
  /// Once in a poll, before first(): adds the activated groups, and drops those that are idle.
  void update() noexcept;
  /// Drops a group that has nothing in flight, and will not have any more.
  void remove(ActiveGroup& group) noexcept;
  /// The groups, all of type Group, in no order; null: no more.
  template <class Group>
  Group* first() const noexcept {
    return static_cast<Group*>(first_);
  }
  template <class Group>
  static Group* after(const Group& group) noexcept {
    return static_cast<Group*>(static_cast<const ActiveGroup&>(group).next_);
  }

 private:
  void add_activated() noexcept;

  std::atomic<ActiveGroup*> activated_{nullptr};  ///< a stack
  ActiveGroup* first_ = nullptr;
};

/// The words on which a rank's threads sleep. They may lie in memory shared with other ranks; a peer rings after each
/// change that this rank may wait for. All accesses are sequentially consistent: the peer stores its flag and then
/// reads whether this rank sleeps, this rank stores that it sleeps and then reads the peer's flag, and one of the two
/// must see the other's store.
struct Doorbell {
  alignas(128) std::atomic<std::uint32_t> rings{0};
  std::atomic<std::uint32_t> waiters{0};
  alignas(128) std::atomic<std::uint32_t> ping{0};  ///< incremented to check whether this rank is alive ...
  std::atomic<std::uint32_t> pong{0};               ///< ... answered by its progress thread
  std::atomic<std::uint32_t> attention{0};          ///< the idle progress thread sleeps on it
  std::atomic<std::uint32_t> idle{0};               ///< state of that sleep: kDozes for a tick, kSleeps until woken
};

/// Wakes sleeping threads of `bell`'s rank. Any process that maps it may call it.
TESSERA_API void ring(Doorbell& bell) noexcept;
/// Requests a sign of life and wakes the thread that replies; returns the value that pong will then have.
TESSERA_API std::uint32_t send_ping(Doorbell& bell) noexcept;

struct ProgressOptions {
  bool thread = true;                ///< tests switch it off to check what depends on it
  bool oversubscribed = false;       ///< more ranks than cores: never spin
  ProgressWaiter* waiter = nullptr;  ///< replaces the doorbell's words; must outlive the engine
  /// How often deadlines and the health of peers are checked, also by sleeping threads. Tests set a long time, since a
  /// short one would hide a missing wake-up.
  std::chrono::milliseconds longest_sleep{100};
};

class TESSERA_API ProgressEngine {
 public:
  using Options = ProgressOptions;
  ProgressEngine(Doorbell& bell, Options options);
  ~ProgressEngine();

  void add(Pollable& item);
  void remove(Pollable& item);
  /// The groups among which the items of add() poll those that have operations in flight.
  ActiveGroups& active_groups() noexcept { return active_groups_; }

  /// Counts operations in flight: the progress thread sleeps while there are none.
  void begin_operation() noexcept {
    outstanding_.fetch_add(1);
    begun_.fetch_add(1, std::memory_order_relaxed);
  }
  void end_operation() noexcept { outstanding_.fetch_sub(1); }

  /// Drives until `finished` is not 0 or until `until`. True: finished.
  bool wait(const std::atomic<std::uint32_t>& finished, Clock::time_point until) noexcept;
  /// Called after a small operation was started: its peers probably start it too, and handing it over would cost more
  /// than the operation. Drives while anything progresses or for a short time, until `finished`.
  void spin_for_completion(const std::atomic<std::uint32_t>& finished) noexcept;
  /// Does one bounded amount of work, unless another thread is polling.
  bool try_poll(bool with_health_check) noexcept;
  /// The calling thread leaves work in flight: wakes the progress thread.
  void wake_progress_thread() noexcept;
  /// The calling thread has issued work, and it is unknown whether it will wait at once. A needless wake-up costs an
  /// operation 40 us if the two threads share a core. So the progress thread isn't woken if the last operations were
  /// all waited for at once; it checks by itself within a tick.
  void wake_progress_thread_if_idle() noexcept;
  /// Under the lock: `call` runs soon in the progress thread, without the lock; without that thread, in wait().
  void defer(std::function<void()> call);
  /// The lock under which all polling happens.
  std::mutex& mutex() noexcept { return mutex_; }
  /// Wakes this rank's waiting threads (an operation is done that another thread may wait for).
  void wake_waiters() noexcept;
  /// Answers pings; also called by threads that wait for pongs themselves.
  void reply_to_pings() noexcept;
  bool oversubscribed() const noexcept { return options_.oversubscribed; }

 private:
  void count_awaited() noexcept;
  void run_deferred() noexcept;
  bool poll_locked(bool with_health_check) noexcept;
  template <class Condition>
  void wait_for_event(Condition needless, Clock::time_point until) noexcept;
  void run() noexcept;

  Doorbell& bell_;
  const Options options_;
  std::mutex mutex_;
  std::vector<Pollable*> items_;
  ActiveGroups active_groups_;
  std::atomic<std::uint32_t> waiters_{0};
  std::atomic<std::int64_t> outstanding_{0};
  std::atomic<std::uint64_t> begun_{0};    ///< operations started so far
  std::atomic<std::uint32_t> awaited_{0};  ///< latest hand-overs that were waited for at once, up to kTrust
  std::atomic<bool> unseen_{false};        ///< work was issued without waking the thread
  std::mutex deferred_mutex_;
  std::vector<std::function<void()>> deferred_;  ///< guarded by deferred_mutex_
  std::atomic<bool> any_deferred_{false};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace tessera::comm
