#include "tessera/comm/core/progress.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>
#include <optional>
#include <utility>

#include "tessera/base/thread.h"

// Who drives, and who wakes whom.
//
// Any thread that waits for an operation drives all of its rank's operations; the progress thread does so only while
// none waits. A thread that finds nothing to do spins, then yields, then sleeps. It must not sleep past an event, and
// the one that causes the event does not know whether a thread sleeps. So both sides write before they read:
//
//   thread that sleeps                        peer, or another thread of this rank
//   waiters += 1                              stores its flag, or marks the operation as finished
//   reads rings                               reads waiters; if it is not 0:
//   polls once more, under the lock             rings += 1, and wakes `rings`
//   sleeps unless rings has changed
//
// Both accesses are sequentially consistent: either the peer sees the waiter, or the waiter's last poll sees the
// flag. A ring between the two is not lost either, since the kernel compares `rings` with what the waiter read. The
// poll takes the lock instead of trying it: the thread that holds it may have looked at the flag just before it was
// set. Where messages arrive by descriptors, arm() takes the place of the first lines and sleep() that of the last.
//
// The progress thread sleeps on another word, `attention`, for most operations need no hand-over: their caller waits
// at once and drives them better. A thread that leaves work behind wakes it, unless the last kTrust operations were all
// waited for at once; then the thread finds the work by itself, within a tick, and the trust ends if no thread waits.

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
constexpr auto kSpin = 20us;   // then yield: on a busy machine another thread may occupy the awaited core
constexpr auto kYield = 60us;  // then sleep
constexpr auto kBriefly = 100us;
constexpr int kStill = 200;      // polls without progress
constexpr auto kTick = 1ms;      // how often the idle progress thread looks for work ...
constexpr int kQuietTicks = 50;  // ... until it found none for so many ticks; then it must be woken
constexpr std::uint32_t kDozes = 1;
constexpr std::uint32_t kSleeps = 2;
constexpr std::uint32_t kTrust = 4;

static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t) &&
              std::atomic<std::uint32_t>::is_always_lock_free);

/// Not FUTEX_PRIVATE: the word may lie in memory shared by processes.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::chrono::nanoseconds time) noexcept {
  if (time <= 0ns) return;
  const timespec limit{static_cast<time_t>(time.count() / 1'000'000'000),
                       static_cast<long>(time.count() % 1'000'000'000)};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void futex_wake(std::atomic<std::uint32_t>& word) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void nap() noexcept {
  const timespec time{0, 30'000};
  ::nanosleep(&time, nullptr);
}

}  // namespace

Pollable::~Pollable() = default;
ProgressWaiter::~ProgressWaiter() = default;

void ring(Doorbell& bell) noexcept {
  if (bell.waiters.load() == 0) return;
  bell.rings.fetch_add(1);
  futex_wake(bell.rings);
}

std::uint32_t send_ping(Doorbell& bell) noexcept {
  const std::uint32_t ping = bell.ping.fetch_add(1) + 1;
  bell.attention.fetch_add(1);
  futex_wake(bell.attention);
  bell.rings.fetch_add(1);
  futex_wake(bell.rings);
  return ping;
}

ProgressEngine::ProgressEngine(Doorbell& bell, Options options) : bell_(bell), options_(options) {
  if (options_.thread) thread_ = base::start_thread([this] { run(); });
}

ProgressEngine::~ProgressEngine() {
  stop_ = true;
  bell_.attention.fetch_add(1);
  futex_wake(bell_.attention);
  bell_.rings.fetch_add(1);
  futex_wake(bell_.rings);
  if (options_.waiter != nullptr) options_.waiter->wake();
  if (thread_.joinable()) thread_.join();
}

void ProgressEngine::wake_waiters() noexcept {
  if (options_.waiter == nullptr) return ring(bell_);
  if (bell_.waiters.load() == 0) return;
  bell_.rings.fetch_add(1);  // before: a thread that is about to arm the waiter takes this wake-up for an earlier one
  options_.waiter->wake();
}

void ProgressEngine::add(Pollable& item) {
  const std::lock_guard lock(mutex_);
  items_.push_back(&item);
}

void ProgressEngine::remove(Pollable& item) {
  const std::lock_guard lock(mutex_);
  std::erase(items_, &item);
}

bool ProgressEngine::poll_locked(bool with_health_check) noexcept {
  bool moved = false;
  for (Pollable* item : items_) moved |= item->poll(with_health_check);
  return moved;
}

bool ProgressEngine::try_poll(bool with_health_check) noexcept {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  return lock.owns_lock() && poll_locked(with_health_check);
}

void ProgressEngine::spin_for_completion(const std::atomic<std::uint32_t>& finished) noexcept {
  std::optional<Clock::time_point> until;  // most operations are done before the clock is read
  int still = 0;
  for (int turn = 1; finished.load() == 0 && still < kStill; ++turn) {
    const bool moved = try_poll(false);
    still = moved ? 0 : still + 1;
    // The other ranks need this core, but not before this rank has nothing left to do.
    if (!moved && options_.oversubscribed) ::sched_yield();
    if (turn % 16 != 0 && (moved || !options_.oversubscribed)) continue;
    const Clock::time_point now = Clock::now();
    if (!until) until = now + (options_.oversubscribed ? kBriefly / 2 : kBriefly);
    if (now >= *until) return;
  }
}

/// Publishes the sleep, polls once more (acquiring the lock itself, since another thread that holds it may have looked
/// too early), then sleeps unless that progressed, `needless()` is true, or a thread has rung since the sleep was
/// published: a waiter only counts what came after arm().
template <class Condition>
void ProgressEngine::wait_for_event(Condition needless, Clock::time_point until) noexcept {
  bell_.waiters.fetch_add(1);
  const std::uint32_t seen = bell_.rings.load();
  bool moved = false;
  {
    const std::lock_guard lock(mutex_);
    moved = poll_locked(true);
    if (!moved && options_.waiter != nullptr) moved = !options_.waiter->arm();
  }
  if (!moved && !needless() && bell_.rings.load() == seen) {
    const auto time = std::min<std::chrono::nanoseconds>(until - Clock::now(), options_.longest_sleep);
    if (options_.waiter == nullptr) {
      futex_wait(bell_.rings, seen, time);
    } else if (time > 0ns) {
      options_.waiter->sleep(time);
    }
  }
  bell_.waiters.fetch_sub(1);
}

bool ProgressEngine::wait(const std::atomic<std::uint32_t>& finished, Clock::time_point until) noexcept {
  if (finished.load() != 0) return true;
  waiters_.fetch_add(1);
  if (unseen_.load() && unseen_.exchange(false)) count_awaited();
  Clock::time_point idle_since = Clock::now();
  for (std::uint32_t turn = 1; finished.load() == 0; ++turn) {
    if (!options_.thread) run_deferred();
    if (try_poll(turn % 256 == 0)) {
      if (turn % 16 == 0) idle_since = Clock::now();
      continue;
    }
    pause();
    if (turn % 32 != 0 && !options_.oversubscribed) continue;
    const Clock::time_point now = Clock::now();
    if (now >= until) break;
    const auto idle = now - idle_since;
    if (idle < kSpin && !options_.oversubscribed) continue;
    if (idle < kYield) {
      ::sched_yield();
      continue;
    }
    wait_for_event([&] { return finished.load() != 0; }, until);
    idle_since = Clock::now() - kSpin;  // after a sleep: yield a little before the next one
  }
  if (!options_.thread) run_deferred();
  waiters_.fetch_sub(1);
  if (outstanding_.load() > 0) wake_progress_thread();
  return finished.load() != 0;
}

void ProgressEngine::defer(std::function<void()> call) {
  {
    const std::lock_guard lock(deferred_mutex_);
    deferred_.push_back(std::move(call));
  }
  any_deferred_.store(true);
  bell_.attention.fetch_add(1);
  futex_wake(bell_.attention);
}

void ProgressEngine::run_deferred() noexcept {
  if (!any_deferred_.load()) return;
  any_deferred_.store(false);
  std::vector<std::function<void()>> calls;
  {
    const std::lock_guard lock(deferred_mutex_);
    calls.swap(deferred_);
  }
  for (const auto& call : calls) call();
}

void ProgressEngine::wake_progress_thread() noexcept {
  if (waiters_.load() != 0 || bell_.idle.load() == 0) return;
  bell_.attention.fetch_add(1);
  futex_wake(bell_.attention);
}

void ProgressEngine::wake_progress_thread_if_idle() noexcept {
  if (awaited_.load() < kTrust || bell_.idle.load() != kDozes) return wake_progress_thread();
  unseen_.store(true);
}

void ProgressEngine::count_awaited() noexcept {
  const std::uint32_t so_far = awaited_.load();
  if (so_far < kTrust) awaited_.store(so_far + 1);
}

void ProgressEngine::reply_to_pings() noexcept { bell_.pong.store(bell_.ping.load()); }

void ProgressEngine::run() noexcept {
  ::prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0);  // nanoseconds, of this thread, for short sleeps
  const auto idle = [this] { return !any_deferred_.load() && (waiters_.load() != 0 || outstanding_.load() <= 0); };
  std::uint64_t begun = 0;
  int quiet = 0;
  while (!stop_) {
    reply_to_pings();
    run_deferred();
    if (idle()) {
      const std::uint64_t now = begun_.load(std::memory_order_relaxed);
      quiet = std::exchange(begun, now) == now ? quiet + 1 : 0;
      const bool sleeps = quiet > kQuietTicks;
      bell_.idle.store(sleeps ? kSleeps : kDozes);
      const std::uint32_t seen = bell_.attention.load();
      if (!stop_ && idle() && bell_.ping.load() == bell_.pong.load())
        futex_wait(bell_.attention, seen, sleeps ? 10 * options_.longest_sleep : std::chrono::nanoseconds(kTick));
      bell_.idle.store(0);
      if (stop_ || outstanding_.load() <= 0) continue;
      if (unseen_.exchange(false) && waiters_.load() == 0) {
        awaited_.store(0);  // no thread waited for it
      } else if (bell_.attention.load() != seen) {
        // The issuing thread often waits for its operation at once and drives it better: then no hand-over.
        nap();
        waiters_.load() != 0 ? count_awaited() : awaited_.store(0);
      }
      continue;
    }
    if (try_poll(false)) continue;
    const auto needless = [this, idle] {
      return stop_ || any_deferred_.load() || idle() || bell_.ping.load() != bell_.pong.load();
    };
    wait_for_event(needless, Clock::now() + options_.longest_sleep);
  }
}

void ActiveGroups::add_activated() noexcept {
  if (activated_.load() == nullptr) return;
  ActiveGroup* group = activated_.exchange(nullptr);
  while (group != nullptr) {
    ActiveGroup* const next = group->next_;
    group->idle_polls_ = 0;
    group->next_ = first_;
    first_ = group;
    group = next;
  }
}

void ActiveGroups::update() noexcept {
  add_activated();
  for (ActiveGroup** at = &first_; *at != nullptr;) {
    ActiveGroup& group = **at;
    group.idle_polls_ = group.any_in_flight() ? 0 : group.idle_polls_ + 1;
    if (group.idle_polls_ <= kIdlePolls) {
      at = &group.next_;
      continue;
    }
    ActiveGroup* const next = group.next_;  // once it is not listed, another thread may write it
    group.listed_.store(false);
    if (group.any_in_flight() && !group.listed_.exchange(true)) {  // begun meanwhile, by a thread that saw it listed
      group.idle_polls_ = 0;
      at = &group.next_;
    } else {
      *at = next;
    }
  }
}

void ActiveGroups::remove(ActiveGroup& group) noexcept {
  add_activated();
  for (ActiveGroup** at = &first_; *at != nullptr; at = &(*at)->next_)
    if (*at == &group) {
      *at = group.next_;
      break;
    }
  group.listed_.store(false);
}

}  // namespace tessera::comm
