// Progress has no fixed owner: it is a function under a try-lock that serves all communicators of one rank. A thread
// that waits drives it; the progress thread drives it only while nobody waits.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/base_names.h"
#include "tessera/comm/pollable.h"

namespace tessera::comm {

/// The words on which a rank's threads sleep. They may lie in memory that other ranks share; a peer rings after each
/// change that this rank may wait for. All accesses are sequentially consistent: "store my flag, then look whether he
/// sleeps" against "say that I sleep, then look at his flag" needs that one of the two sees the other.
struct Doorbell {
  alignas(128) std::atomic<std::uint32_t> rings{0};
  std::atomic<std::uint32_t> waiters{0};
  alignas(128) std::atomic<std::uint32_t> ping{0};  ///< asked by whoever wonders whether this rank is alive ...
  std::atomic<std::uint32_t> pong{0};               ///< ... answered by its progress thread
  std::atomic<std::uint32_t> attention{0};          ///< on which the idle progress thread sleeps
  std::atomic<std::uint32_t> idle{0};               ///< it does: kDozes for a tick, kSleeps until it is woken
};

/// Wakes the threads of `bell`'s rank if any sleeps. Any process that maps it.
TESSERA_API void ring(Doorbell& bell) noexcept;
/// Asks for a sign of life and wakes whoever can give it; returns what pong will then be.
TESSERA_API std::uint32_t send_ping(Doorbell& bell) noexcept;

struct ProgressOptions {
  bool thread = true;                ///< tests switch it off to see what depends on it
  bool oversubscribed = false;       ///< more ranks than cores: never spin
  ProgressWaiter* waiter = nullptr;  ///< instead of the doorbell's words; outlives the engine
  /// Deadlines and the health of peers are looked at this often, also by who sleeps. Tests make it long: it would hide
  /// that somebody was not woken.
  std::chrono::milliseconds longest_sleep{100};
};

class TESSERA_API ProgressEngine {
 public:
  using Options = ProgressOptions;
  ProgressEngine(Doorbell& bell, Options options);
  ~ProgressEngine();
  ProgressEngine(const ProgressEngine&) = delete;
  ProgressEngine& operator=(const ProgressEngine&) = delete;

  void add(Pollable& item);
  void remove(Pollable& item);

  /// Operations in flight: the progress thread sleeps while there are none.
  void begin_operation() noexcept {
    outstanding_.fetch_add(1);
    begun_.fetch_add(1, std::memory_order_relaxed);
  }
  void end_operation() noexcept { outstanding_.fetch_sub(1); }

  /// Drives until `finished` is not 0 or `until`. True: finished.
  bool wait(const std::atomic<std::uint32_t>& finished, Clock::time_point until) noexcept;
  /// For who has just started a small operation: its peers are probably about to do the same, and a hand-off would cost
  /// more than all of it. So drives as long as that moves anything or for a moment, until `finished`.
  void spin_for_completion(const std::atomic<std::uint32_t>& finished) noexcept;
  /// One bounded piece of work, if nobody else is at it.
  bool try_poll(bool with_health_check) noexcept;
  /// Somebody leaves work under way: the progress thread takes over.
  void wake_progress_thread() noexcept;
  /// Somebody has issued work, and either leaves or waits for it at once, which nobody can know. To wake the thread in
  /// vain costs 40 us of an operation where the two share a core; so it isn't woken where the last operations were all
  /// waited for at once, and looks by itself within a tick.
  void wake_progress_thread_if_idle() noexcept;
  /// The lock under which everything is polled.
  std::mutex& mutex() noexcept { return mutex_; }
  /// Wakes this rank's own waiters (an operation is done that somebody else may wait for).
  void wake_waiters() noexcept;
  /// Answers pings; also called by whoever waits for pongs itself.
  void answer_pings() noexcept;
  bool oversubscribed() const noexcept { return options_.oversubscribed; }

 private:
  void note_awaited() noexcept;
  bool poll_locked(bool with_health_check) noexcept;
  template <class Condition>
  void wait_for_event(Condition needless, Clock::time_point until) noexcept;
  void run() noexcept;

  Doorbell& bell_;
  const Options options_;
  std::mutex mutex_;
  std::vector<Pollable*> items_;
  std::atomic<std::uint32_t> waiters_{0};
  std::atomic<std::int64_t> outstanding_{0};
  std::atomic<std::uint64_t> begun_{0};    ///< operations ever
  std::atomic<std::uint32_t> awaited_{0};  ///< the last ones that were handed over, up to kTrust: waited for at once
  std::atomic<bool> unseen_{false};        ///< work was issued, and the thread was not woken for it
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace tessera::comm
