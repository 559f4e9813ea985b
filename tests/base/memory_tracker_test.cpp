#include "tessera/base/memory_tracker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

namespace tessera::base {
namespace {

TEST(MemoryTracker, TracksPeaksPerCategoryAndOfTotal) {
  MemoryTracker memory_tracker;
  memory_tracker.add(MemoryCategory::parameter, 100);
  memory_tracker.add(MemoryCategory::activation, 50);
  memory_tracker.remove(MemoryCategory::activation, 50);
  memory_tracker.add(MemoryCategory::gradient, 30);
  const auto s = memory_tracker.snapshot();
  EXPECT_EQ(s.now_of(MemoryCategory::parameter), 100U);
  EXPECT_EQ(s.now_of(MemoryCategory::activation), 0U);
  EXPECT_EQ(s.peak_of(MemoryCategory::activation), 50U);
  EXPECT_EQ(s.peak_of(MemoryCategory::gradient), 30U);
  EXPECT_EQ(s.peak_of(MemoryCategory::optimizer), 0U);
  EXPECT_EQ(s.total_now, 130U);
  EXPECT_EQ(s.total_peak, 150U) << "the highest sum at one instant, not the sum of the peaks (180)";
}

TEST(MemoryTracker, PeakOutlivesCurrentValue) {  // negative control: a peak that followed `now` would be 10
  MemoryTracker memory_tracker;
  memory_tracker.add(MemoryCategory::other, 1000);
  memory_tracker.remove(MemoryCategory::other, 990);
  EXPECT_EQ(memory_tracker.snapshot().total_peak, 1000U);
  EXPECT_EQ(memory_tracker.snapshot().total_now, 10U);
  memory_tracker.reset_peaks();
  EXPECT_EQ(memory_tracker.snapshot().total_peak, 10U);
  EXPECT_EQ(memory_tracker.snapshot().peak_of(MemoryCategory::other), 10U);
}

/// The highest sum at one instant that a history shows.
std::int64_t highest(const MemoryHistory& history) {
  std::int64_t live = 0;
  for (std::size_t i = 0; i < kMemoryUses; ++i)
    if (static_cast<MemoryCategory>(i) != MemoryCategory::offloaded) live += history.before[i];
  std::int64_t most = live;
  for (const MemoryChange& change : history.changes)
    if (change.use != MemoryCategory::offloaded) most = std::max(most, live += change.bytes);
  return most;
}

TEST(MemoryTracker, HistoryShowsPeak) {
  MemoryTracker memory_tracker;
  memory_tracker.add(MemoryCategory::parameter, 100);
  memory_tracker.keep_history(true);
  memory_tracker.add(MemoryCategory::activation, 50);
  memory_tracker.add(MemoryCategory::offloaded, 5000);
  memory_tracker.remove(MemoryCategory::activation, 50);
  memory_tracker.add(MemoryCategory::gradient, 30);
  MemoryHistory history = memory_tracker.drain_history();
  EXPECT_EQ(history.before[static_cast<std::size_t>(MemoryCategory::parameter)], 100);
  ASSERT_EQ(history.changes.size(), 4U);
  EXPECT_EQ(history.changes[2].bytes, -50);
  EXPECT_LE(history.changes[0].at_ns, history.changes[3].at_ns);
  EXPECT_EQ(highest(history), static_cast<std::int64_t>(memory_tracker.snapshot().total_peak));
  history.changes.erase(history.changes.begin() + 2);  // the negative control: one change less shows another peak
  EXPECT_NE(highest(history), static_cast<std::int64_t>(memory_tracker.snapshot().total_peak));
  EXPECT_EQ(highest(memory_tracker.drain_history()), 130) << "the next history begins where this one ended";
  memory_tracker.keep_history(false);
  memory_tracker.remove(MemoryCategory::gradient, 30);
  EXPECT_TRUE(memory_tracker.drain_history().changes.empty());
  memory_tracker.keep_history(true, [] { return 7; });
  memory_tracker.add(MemoryCategory::gradient, 30);
  EXPECT_EQ(memory_tracker.drain_history().changes.at(0).at_ns, 7) << "the time is that of the given clock";
}

TEST(MemoryTracker, ReservedIsMaximumPoolOverhead) {
  MemoryTracker memory_tracker;
  memory_tracker.add(MemoryCategory::activation, 100);
  EXPECT_EQ(memory_tracker.snapshot().reserved, 0U);
  memory_tracker.hold(40);  // held 140, live 100
  EXPECT_EQ(memory_tracker.snapshot().reserved, 40U);
  memory_tracker.hold(-40);
  memory_tracker.add(MemoryCategory::activation, 20);
  EXPECT_EQ(memory_tracker.snapshot().total_peak, 120U);
  EXPECT_EQ(memory_tracker.snapshot().reserved, 20U) << "140 were held once; the live peak is 120";
  memory_tracker.reset_peaks();
  EXPECT_EQ(memory_tracker.snapshot().reserved, 0U);
}

TEST(MemoryTracker, IdleMemoryBelowPeakIsNotReserved) {
  MemoryTracker memory_tracker;
  memory_tracker.add(MemoryCategory::other, 100);
  memory_tracker.remove(MemoryCategory::other, 60);
  memory_tracker.hold(60);  // the same 100 bytes are held, 60 of them idle
  EXPECT_EQ(memory_tracker.snapshot().reserved, 0U);
}

TEST(MemoryTracker, CountsFromManyThreads) {
  MemoryTracker memory_tracker;
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 20'000; ++i) {
        memory_tracker.add(MemoryCategory::activation, 8);
        memory_tracker.remove(MemoryCategory::activation, 8);
      }
      memory_tracker.add(MemoryCategory::parameter, 5);
    });
  threads.clear();
  const auto s = memory_tracker.snapshot();
  EXPECT_EQ(s.now_of(MemoryCategory::activation), 0U);
  EXPECT_EQ(s.now_of(MemoryCategory::parameter), 20U);
  EXPECT_EQ(s.total_now, 20U);
  EXPECT_GE(s.peak_of(MemoryCategory::activation), 8U);
  EXPECT_LE(s.total_peak, 4U * 8 + 20);
}

TEST(TrackedBytes, CountUntilDestroyed) {
  MemoryTracker memory_tracker;
  const auto now = [&] { return memory_tracker.snapshot().now_of(MemoryCategory::optimizer); };
  {
    TrackedBytes first(memory_tracker, MemoryCategory::optimizer, 10);
    EXPECT_EQ(now(), 10U);
    TrackedBytes second = std::move(first);
    EXPECT_EQ(now(), 10U) << "moved, not doubled";
    TrackedBytes third(memory_tracker, MemoryCategory::optimizer, 5);
    third = std::move(second);
    EXPECT_EQ(now(), 10U) << "the old booking is gone";
    third.reset();
    third.reset();
    EXPECT_EQ(now(), 0U);
    TrackedBytes last(memory_tracker, MemoryCategory::optimizer, 7);
    EXPECT_EQ(now(), 7U);
  }
  EXPECT_EQ(now(), 0U);
}

TEST(MemoryTracker, CategoriesHaveNamesOfReports) {
  EXPECT_EQ(name_of(MemoryCategory::unsharded_parameter), "unsharded_parameter");
  EXPECT_EQ(name_of(MemoryCategory::other), "other");
  EXPECT_EQ(name_of(MemoryCategory::offloaded), "offloaded");
  EXPECT_EQ(static_cast<std::size_t>(MemoryCategory::offloaded) + 1, kMemoryUses);
}

TEST(MemoryTracker, TotalsExcludeOffloadedMemory) {
  MemoryTracker memory_tracker;
  {
    const TrackedBytes with_host(memory_tracker, MemoryCategory::offloaded, 1000);
    const TrackedBytes on_device(memory_tracker, MemoryCategory::parameter, 10);
    EXPECT_EQ(memory_tracker.snapshot().now_of(MemoryCategory::offloaded), 1000U);
    EXPECT_EQ(memory_tracker.snapshot().total_now, 10U);
  }
  EXPECT_EQ(memory_tracker.snapshot().peak_of(MemoryCategory::offloaded), 1000U);
  EXPECT_EQ(memory_tracker.snapshot().total_peak, 10U);
  EXPECT_EQ(memory_tracker.snapshot().now_of(MemoryCategory::offloaded), 0U);
  EXPECT_EQ(memory_tracker.snapshot().total_now, 0U);
}

}  // namespace
}  // namespace tessera::base
