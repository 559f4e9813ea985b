#include "tessera/base/memory_tracker.h"

#include <gtest/gtest.h>

#include <thread>
#include <utility>
#include <vector>

namespace tessera::base {
namespace {

TEST(Ledger, EachUseHasItsOwnPeakAndTheTotalItsOwnInstant) {
  MemoryTracker ledger;
  ledger.add(MemoryCategory::parameter, 100);
  ledger.add(MemoryCategory::activation, 50);
  ledger.remove(MemoryCategory::activation, 50);
  ledger.add(MemoryCategory::gradient, 30);
  const auto s = ledger.snapshot();
  EXPECT_EQ(s.now_of(MemoryCategory::parameter), 100U);
  EXPECT_EQ(s.now_of(MemoryCategory::activation), 0U);
  EXPECT_EQ(s.peak_of(MemoryCategory::activation), 50U);
  EXPECT_EQ(s.peak_of(MemoryCategory::gradient), 30U);
  EXPECT_EQ(s.peak_of(MemoryCategory::optimizer), 0U);
  EXPECT_EQ(s.total_now, 130U);
  EXPECT_EQ(s.total_peak, 150U) << "the highest sum at one instant, not the sum of the peaks (180)";
}

TEST(Ledger, PeakRemembersWhatNowForgot) {  // negative control: a peak that followed `now` would say 10
  MemoryTracker ledger;
  ledger.add(MemoryCategory::other, 1000);
  ledger.remove(MemoryCategory::other, 990);
  EXPECT_EQ(ledger.snapshot().total_peak, 1000U);
  EXPECT_EQ(ledger.snapshot().total_now, 10U);
  ledger.reset_peaks();
  EXPECT_EQ(ledger.snapshot().total_peak, 10U);
  EXPECT_EQ(ledger.snapshot().peak_of(MemoryCategory::other), 10U);
}

TEST(Ledger, ReservedIsWhatPoolingCostAtItsWorst) {
  MemoryTracker ledger;
  ledger.add(MemoryCategory::activation, 100);
  EXPECT_EQ(ledger.snapshot().reserved, 0U);
  ledger.hold(40);  // held 140, live 100
  EXPECT_EQ(ledger.snapshot().reserved, 40U);
  ledger.hold(-40);
  ledger.add(MemoryCategory::activation, 20);
  EXPECT_EQ(ledger.snapshot().total_peak, 120U);
  EXPECT_EQ(ledger.snapshot().reserved, 20U) << "140 were held once; the live peak is 120";
  ledger.reset_peaks();
  EXPECT_EQ(ledger.snapshot().reserved, 0U);
}

TEST(Ledger, IdleMemoryBelowThePeakIsNotReserved) {
  MemoryTracker ledger;
  ledger.add(MemoryCategory::other, 100);
  ledger.remove(MemoryCategory::other, 60);
  ledger.hold(60);  // the same 100 bytes are held, 60 of them idle
  EXPECT_EQ(ledger.snapshot().reserved, 0U);
}

TEST(Ledger, CountsFromManyThreads) {
  MemoryTracker ledger;
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 20'000; ++i) {
        ledger.add(MemoryCategory::activation, 8);
        ledger.remove(MemoryCategory::activation, 8);
      }
      ledger.add(MemoryCategory::parameter, 5);
    });
  threads.clear();
  const auto s = ledger.snapshot();
  EXPECT_EQ(s.now_of(MemoryCategory::activation), 0U);
  EXPECT_EQ(s.now_of(MemoryCategory::parameter), 20U);
  EXPECT_EQ(s.total_now, 20U);
  EXPECT_GE(s.peak_of(MemoryCategory::activation), 8U);
  EXPECT_LE(s.total_peak, 4U * 8 + 20);
}

TEST(LedgerEntry, BooksForAsLongAsItLives) {
  MemoryTracker ledger;
  const auto now = [&] { return ledger.snapshot().now_of(MemoryCategory::optimizer); };
  {
    TrackedBytes first(ledger, MemoryCategory::optimizer, 10);
    EXPECT_EQ(now(), 10U);
    TrackedBytes second = std::move(first);
    EXPECT_EQ(now(), 10U) << "moved, not doubled";
    TrackedBytes third(ledger, MemoryCategory::optimizer, 5);
    third = std::move(second);
    EXPECT_EQ(now(), 10U) << "the old booking is gone";
    third.reset();
    third.reset();
    EXPECT_EQ(now(), 0U);
    TrackedBytes last(ledger, MemoryCategory::optimizer, 7);
    EXPECT_EQ(now(), 7U);
  }
  EXPECT_EQ(now(), 0U);
}

TEST(Ledger, UsesHaveTheNamesOfTheReports) {
  EXPECT_EQ(name_of(MemoryCategory::unsharded_parameter), "unsharded_parameter");
  EXPECT_EQ(name_of(MemoryCategory::other), "other");
  EXPECT_EQ(name_of(MemoryCategory::offloaded), "offloaded");
  EXPECT_EQ(static_cast<std::size_t>(MemoryCategory::offloaded) + 1, kMemoryUses);
}

TEST(Ledger, WhatLiesWithTheHostIsInNoTotal) {
  MemoryTracker ledger;
  {
    const TrackedBytes with_host(ledger, MemoryCategory::offloaded, 1000);
    const TrackedBytes on_device(ledger, MemoryCategory::parameter, 10);
    EXPECT_EQ(ledger.snapshot().now_of(MemoryCategory::offloaded), 1000U);
    EXPECT_EQ(ledger.snapshot().total_now, 10U);
  }
  EXPECT_EQ(ledger.snapshot().peak_of(MemoryCategory::offloaded), 1000U);
  EXPECT_EQ(ledger.snapshot().total_peak, 10U);
  EXPECT_EQ(ledger.snapshot().now_of(MemoryCategory::offloaded), 0U);
  EXPECT_EQ(ledger.snapshot().total_now, 0U);
}

}  // namespace
}  // namespace tessera::base
