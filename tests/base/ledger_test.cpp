#include "tessera/base/ledger.h"

#include <gtest/gtest.h>

#include <thread>
#include <utility>
#include <vector>

namespace tessera::base {
namespace {

TEST(Ledger, EachUseHasItsOwnPeakAndTheTotalItsOwnInstant) {
  Ledger ledger;
  ledger.add(MemoryUse::parameter, 100);
  ledger.add(MemoryUse::activation, 50);
  ledger.remove(MemoryUse::activation, 50);
  ledger.add(MemoryUse::gradient, 30);
  const auto s = ledger.snapshot();
  EXPECT_EQ(s.now_of(MemoryUse::parameter), 100U);
  EXPECT_EQ(s.now_of(MemoryUse::activation), 0U);
  EXPECT_EQ(s.peak_of(MemoryUse::activation), 50U);
  EXPECT_EQ(s.peak_of(MemoryUse::gradient), 30U);
  EXPECT_EQ(s.peak_of(MemoryUse::optimizer), 0U);
  EXPECT_EQ(s.total_now, 130U);
  EXPECT_EQ(s.total_peak, 150U) << "the highest sum at one instant, not the sum of the peaks (180)";
}

TEST(Ledger, PeakRemembersWhatNowForgot) {  // negative control: a peak that followed `now` would say 10
  Ledger ledger;
  ledger.add(MemoryUse::other, 1000);
  ledger.remove(MemoryUse::other, 990);
  EXPECT_EQ(ledger.snapshot().total_peak, 1000U);
  EXPECT_EQ(ledger.snapshot().total_now, 10U);
  ledger.reset_peaks();
  EXPECT_EQ(ledger.snapshot().total_peak, 10U);
  EXPECT_EQ(ledger.snapshot().peak_of(MemoryUse::other), 10U);
}

TEST(Ledger, ReservedIsWhatPoolingCostAtItsWorst) {
  Ledger ledger;
  ledger.add(MemoryUse::activation, 100);
  EXPECT_EQ(ledger.snapshot().reserved, 0U);
  ledger.hold(40);  // held 140, live 100
  EXPECT_EQ(ledger.snapshot().reserved, 40U);
  ledger.hold(-40);
  ledger.add(MemoryUse::activation, 20);
  EXPECT_EQ(ledger.snapshot().total_peak, 120U);
  EXPECT_EQ(ledger.snapshot().reserved, 20U) << "140 were held once; the live peak is 120";
  ledger.reset_peaks();
  EXPECT_EQ(ledger.snapshot().reserved, 0U);
}

TEST(Ledger, IdleMemoryBelowThePeakIsNotReserved) {
  Ledger ledger;
  ledger.add(MemoryUse::other, 100);
  ledger.remove(MemoryUse::other, 60);
  ledger.hold(60);  // the same 100 bytes are held, 60 of them idle
  EXPECT_EQ(ledger.snapshot().reserved, 0U);
}

TEST(Ledger, CountsFromManyThreads) {
  Ledger ledger;
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 20'000; ++i) {
        ledger.add(MemoryUse::activation, 8);
        ledger.remove(MemoryUse::activation, 8);
      }
      ledger.add(MemoryUse::parameter, 5);
    });
  threads.clear();
  const auto s = ledger.snapshot();
  EXPECT_EQ(s.now_of(MemoryUse::activation), 0U);
  EXPECT_EQ(s.now_of(MemoryUse::parameter), 20U);
  EXPECT_EQ(s.total_now, 20U);
  EXPECT_GE(s.peak_of(MemoryUse::activation), 8U);
  EXPECT_LE(s.total_peak, 4U * 8 + 20);
}

TEST(LedgerEntry, BooksForAsLongAsItLives) {
  Ledger ledger;
  const auto now = [&] { return ledger.snapshot().now_of(MemoryUse::optimizer); };
  {
    LedgerEntry first(ledger, MemoryUse::optimizer, 10);
    EXPECT_EQ(now(), 10U);
    LedgerEntry second = std::move(first);
    EXPECT_EQ(now(), 10U) << "moved, not doubled";
    LedgerEntry third(ledger, MemoryUse::optimizer, 5);
    third = std::move(second);
    EXPECT_EQ(now(), 10U) << "the old booking is gone";
    third.reset();
    third.reset();
    EXPECT_EQ(now(), 0U);
    LedgerEntry last(ledger, MemoryUse::optimizer, 7);
    EXPECT_EQ(now(), 7U);
  }
  EXPECT_EQ(now(), 0U);
}

TEST(Ledger, UsesHaveTheNamesOfTheReports) {
  EXPECT_EQ(name_of(MemoryUse::unsharded_parameter), "unsharded_parameter");
  EXPECT_EQ(name_of(MemoryUse::other), "other");
  EXPECT_EQ(name_of(MemoryUse::offloaded), "offloaded");
  EXPECT_EQ(static_cast<std::size_t>(MemoryUse::offloaded) + 1, kMemoryUses);
}

TEST(Ledger, WhatLiesWithTheHostIsInNoTotal) {
  Ledger ledger;
  {
    const LedgerEntry with_host(ledger, MemoryUse::offloaded, 1000);
    const LedgerEntry on_device(ledger, MemoryUse::parameter, 10);
    EXPECT_EQ(ledger.snapshot().now_of(MemoryUse::offloaded), 1000U);
    EXPECT_EQ(ledger.snapshot().total_now, 10U);
  }
  EXPECT_EQ(ledger.snapshot().peak_of(MemoryUse::offloaded), 1000U);
  EXPECT_EQ(ledger.snapshot().total_peak, 10U);
  EXPECT_EQ(ledger.snapshot().now_of(MemoryUse::offloaded), 0U);
  EXPECT_EQ(ledger.snapshot().total_now, 0U);
}

}  // namespace
}  // namespace tessera::base
