#include "tessera/nn/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::nn {
namespace {

TEST(ThreadPool, EveryTileRunsOnce) {
  for (const std::size_t threads : {1, 2, 3, 5}) {
    ThreadPool pool(threads);
    for (const std::size_t tiles : {0, 1, 2, 7, 100}) {
      std::vector<std::atomic<int>> runs(tiles);
      pool.parallel_for(tiles, [&](std::size_t tile) { runs[tile].fetch_add(1); });
      for (auto& count : runs) EXPECT_EQ(count.load(), 1);
    }
  }
}

TEST(ThreadPool, ManyShortRuns) {
  ThreadPool pool(3);
  std::atomic<std::size_t> total{0};
  for (int i = 0; i < 2000; ++i) pool.parallel_for(4, [&](std::size_t tile) { total += tile; });
  EXPECT_EQ(total.load(), 2000u * 6u);
}

TEST(ThreadPool, WorkerNumberIsUsedByOneTileAtATime) {
  ThreadPool pool(3);
  std::vector<std::atomic<int>> inside(3);
  std::atomic<bool> shared{false};
  pool.parallel_for(300, [&](std::size_t, std::size_t worker) {
    ASSERT_LT(worker, 3u);
    if (inside[worker].fetch_add(1) != 0) shared = true;
    std::this_thread::yield();
    inside[worker].fetch_sub(1);
  });
  EXPECT_FALSE(shared.load());
}

TEST(ThreadPool, ExceptionReachesCallerAndPoolStaysUsable) {
  for (const std::size_t threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    const auto throwing = [&](std::size_t tile) {
      if (tile == 5) throw std::runtime_error("tile 5");
    };
    EXPECT_THROW(pool.parallel_for(50, throwing), std::runtime_error);
    std::atomic<int> runs{0};
    pool.parallel_for(50, [&](std::size_t) { ++runs; });
    EXPECT_EQ(runs.load(), 50);
  }
}

TEST(ThreadPool, PoolsOfSeveralRanksWorkAtOnce) {
  std::atomic<int> total{0};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank)
    ranks.emplace_back([&] {
      ThreadPool pool(2);
      for (int i = 0; i < 200; ++i) pool.parallel_for(5, [&](std::size_t) { ++total; });
    });
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(total.load(), 3 * 200 * 5);
}

TEST(ThreadPool, RejectsZeroThreads) { EXPECT_THROW(ThreadPool(0), base::InvalidUsage); }

}  // namespace
}  // namespace tessera::nn
