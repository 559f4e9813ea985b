// How the threads of a rank sleep and wake up. The longest sleep is long enough to expose a missed wake-up.
#include <sys/prctl.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "tessera/comm/core/backoff.h"
#include "tessera/comm/core/progress.h"
#include "tests/comm/support.h"

namespace tessera::comm_test {
namespace {

constexpr auto kMaxSleep = 60s;
constexpr auto kSoon = 20s;  // a woken thread reacts within this time, also on a busy machine

/// Calls `look` whenever it is polled.
struct Watched final : Pollable {
  bool poll(bool with_health_check) noexcept override { return look(with_health_check); }
  std::function<bool(bool with_health_check)> look = [](bool) { return false; };
};

bool soon(const std::function<bool()>& reached) {
  const auto until = Clock::now() + kSoon;
  while (!reached()) {
    if (Clock::now() > until) return false;
    std::this_thread::sleep_for(100us);
  }
  return true;
}

void on_another_thread(const std::function<void()>& call) { std::thread(call).join(); }

/// A peer that changes the awaited state right after a thread's last poll before it sleeps, and then rings.
class Peer {
 public:
  Peer(Doorbell& bell, int rounds) : Peer([&bell] { ring(bell); }, rounds) {}
  Peer(std::function<void()> wake, int rounds) : wake_(std::move(wake)), rounds_(rounds) {}
  /// True: progress was made.
  bool look(bool with_health_check) {
    if (changed_.exchange(false)) {
      ++seen_;
      return true;
    }
    if (with_health_check && seen_.load() < rounds_)
      on_another_thread([&] {
        changed_.store(true);
        wake_();
      });
    return false;
  }
  int seen() const { return seen_.load(); }

 private:
  const std::function<void()> wake_;
  const int rounds_;
  std::atomic<bool> changed_{false};
  std::atomic<int> seen_{0};
};

TEST(ProgressWaits, ProgressThreadMissesNoWakeup) {
  Doorbell bell;
  Watched watched;
  Peer peer(bell, 50);
  ProgressEngine engine(bell, {.longest_sleep = kMaxSleep});
  watched.look = [&](bool with_health_check) { return peer.look(with_health_check); };
  engine.add(watched);
  engine.begin_operation();
  engine.wake_progress_thread();
  EXPECT_TRUE(soon([&] { return peer.seen() == 50; })) << peer.seen();
  engine.end_operation();
}

TEST(ProgressWaits, WaiterMissesNoWakeup) {
  Doorbell bell;
  Watched watched;
  Peer peer(bell, 50);
  std::atomic<std::uint32_t> finished{0};
  ProgressEngine engine(bell, {.thread = false, .longest_sleep = kMaxSleep});
  watched.look = [&](bool with_health_check) {
    const bool moved = peer.look(with_health_check);
    if (peer.seen() == 50) finished.store(1);
    return moved;
  };
  engine.add(watched);
  EXPECT_TRUE(engine.wait(finished, Clock::now() + kSoon)) << peer.seen();
}

/// As a transport's waiter must: it only counts wake-ups since arm().
class DrainingWaiter final : public ProgressWaiter {
 public:
  bool arm() noexcept override {
    const std::lock_guard lock(mutex_);
    woken_ = false;
    return true;
  }
  void sleep(std::chrono::nanoseconds at_most) noexcept override {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, at_most, [this] { return woken_; });
  }
  void wake() noexcept override {
    const std::lock_guard lock(mutex_);
    woken_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool woken_ = false;
};

TEST(ProgressWaits, TransportsWaiterMissesNoWakeup) {
  Doorbell bell;
  DrainingWaiter waiter;
  Watched watched;
  std::atomic<std::uint32_t> finished{0};
  ProgressEngine engine(bell, {.thread = false, .waiter = &waiter, .longest_sleep = kMaxSleep});
  Peer peer([&engine] { engine.wake_waiters(); }, 50);
  watched.look = [&](bool with_health_check) {
    const bool moved = peer.look(with_health_check);
    if (peer.seen() == 50) finished.store(1);
    return moved;
  };
  engine.add(watched);
  EXPECT_TRUE(engine.wait(finished, Clock::now() + kSoon)) << peer.seen();
}

TEST(ProgressWaits, OperationWakesIdleProgressThread) {
  Doorbell bell;
  Watched watched;
  std::atomic<int> polls{0};
  ProgressEngine engine(bell, {.longest_sleep = kMaxSleep});
  watched.look = [&](bool) {
    ++polls;
    return false;
  };
  engine.add(watched);
  for (int round = 0; round < 3; ++round) {
    constexpr std::uint32_t kSleepsDeep = 2;
    ASSERT_TRUE(soon([&] { return bell.idle.load() == kSleepsDeep; }));
    const int before = polls.load();
    engine.begin_operation();
    engine.wake_progress_thread();
    EXPECT_TRUE(soon([&] { return polls.load() > before; }));
    engine.end_operation();
    ring(bell);  // the thread now sleeps for the operation
  }
}

TEST(ProgressWaits, EndWithEngine) {
  const auto start = Clock::now();
  for (const bool idle : {true, false}) {
    Doorbell bell;
    ProgressEngine engine(bell, {.longest_sleep = kMaxSleep});
    if (!idle) engine.begin_operation();
    engine.wake_progress_thread();
    ASSERT_TRUE(soon([&] { return idle ? bell.idle.load() == 2 : bell.waiters.load() != 0; }));
  }
  EXPECT_LT(Clock::now() - start, kSoon);
}

TEST(ProgressWaits, LastWithoutWakeup) {  // control
  Doorbell bell;
  Watched watched;
  std::atomic<std::uint32_t> finished{0};
  ProgressEngine engine(bell, {.thread = false, .longest_sleep = kMaxSleep});
  const auto start = Clock::now();
  int late_polls = 0;
  watched.look = [&](bool) {
    if (Clock::now() - start > 200ms) ++late_polls;
    return false;
  };
  engine.add(watched);
  EXPECT_FALSE(engine.wait(finished, start + 400ms));
  EXPECT_LT(late_polls, 100) << "it looks a few times at the end, and else it sleeps";
}

TEST(Backoff, SleepsWhereAWaitIsLong) {
  const int slack = ::prctl(PR_GET_TIMERSLACK);
  Backoff pause;
  for (const char* const when : {"at first", "after a reset"}) {
    int turns = 0;
    for (const auto until = Clock::now() + 20ms; Clock::now() < until; ++turns) pause(1s);
    EXPECT_LT(turns, 2'000) << "without sleeps " << when << ", 20 ms are far more turns";
    pause.reset();
  }
  EXPECT_EQ(::prctl(PR_GET_TIMERSLACK), slack) << "the thread's own sleeps are as before";
}

}  // namespace
}  // namespace tessera::comm_test
