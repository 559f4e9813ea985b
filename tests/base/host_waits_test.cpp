#include "tessera/base/device/host_waits.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/harness/limited_device.h"

namespace tessera::base {
namespace {

using namespace std::chrono_literals;

struct Fixture {
  test::LimitedDevice device{0};
  std::unique_ptr<HostEvent> signal = device.make_signal();
  HostWaits waits;
};

/// Calls `work` in a thread and returns whether it returned before `set`, and waits for it after `set`.
template <class Work, class Set>
bool returns_before(const Work& work, const Set& set) {
  std::atomic<bool> returned{false};
  std::thread thread([&] {
    work();
    returned.store(true);
  });
  const auto until = std::chrono::steady_clock::now() + 100ms;
  while (!returned.load() && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(1ms);
  const bool before = returned.load();
  set();
  thread.join();
  return before;
}

TEST(HostWaits, WaitReturnsOnceTheHostHasSetTheEvent) {
  Fixture f;
  f.waits.add(f.signal->arm());
  EXPECT_FALSE(returns_before([&] { f.waits.wait_all(); }, [&] { f.signal->set(); }));
  EXPECT_TRUE(returns_before([&] { f.waits.wait_all(); }, [] {})) << "nothing is left to wait for";
}

TEST(HostWaits, WaitsForEachOfSeveral) {
  Fixture f;
  const auto other = f.device.make_signal();
  f.waits.add(other->arm());
  f.waits.add(f.signal->arm());
  other->set();
  EXPECT_FALSE(returns_before([&] { f.waits.wait_all(); }, [&] { f.signal->set(); }));
}

TEST(HostWaits, WithoutAnEventNothingWaits) {
  Fixture f;
  for (std::size_t i = 0; i < 4 * HostWaits::kMaxRunAhead; ++i) f.waits.count_work();
  f.waits.wait_all();
  f.waits.add(f.signal->arm());
  f.signal->set();
  for (std::size_t i = 0; i < 4 * HostWaits::kMaxRunAhead; ++i) f.waits.count_work();
}

TEST(HostWaits, WorkBehindAnEventIsBounded) {
  Fixture f;
  f.waits.add(f.signal->arm());
  const auto append = [&](std::size_t pieces) {
    return [&f, pieces] {
      for (std::size_t i = 0; i < pieces; ++i) f.waits.count_work();
    };
  };
  EXPECT_TRUE(returns_before(append(HostWaits::kMaxRunAhead), [] {})) << "as much as is allowed";
  EXPECT_FALSE(returns_before(append(1), [&] { f.signal->set(); }));
  EXPECT_TRUE(returns_before(append(4 * HostWaits::kMaxRunAhead), [] {}));
}

TEST(HostWaits, CountsAnewAfterAllEventsWereSet) {
  Fixture f;
  f.waits.add(f.signal->arm());
  for (std::size_t i = 0; i < HostWaits::kMaxRunAhead; ++i) f.waits.count_work();
  f.signal->set();
  f.waits.add(f.signal->arm());
  EXPECT_TRUE(returns_before([&] { f.waits.count_work(); }, [] {}));
  f.signal->set();
}

}  // namespace
}  // namespace tessera::base
