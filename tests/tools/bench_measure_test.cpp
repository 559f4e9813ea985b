// Overlap of operations that are known to be hidden or not, and cold caches against warm ones.
#include <gtest/gtest.h>

#include <numeric>
#include <thread>
#include <vector>

#include "tessera/base/stream.h"
#include "tessera/comm/init.h"
#include "tools/bench/memory_bound.h"
#include "tools/bench/runner.h"

namespace tessera::tools {
namespace {

using std::chrono::steady_clock;

/// An operation that completes after a given time, independent of its caller.
class Timer final : public comm::WorkState {
 public:
  void begin(std::chrono::microseconds time) { end_ = steady_clock::now() + time; }
  bool done() noexcept override { return steady_clock::now() >= end_; }
  bool wait_until(steady_clock::time_point) override { return done(); }
  void wait() override { std::this_thread::sleep_until(end_); }
  void on_done(comm::WorkCallback callback) override {
    wait();
    if (callback) callback(nullptr);
  }

 private:
  void recycle() noexcept override {}
  steady_clock::time_point end_;
};

constexpr std::chrono::milliseconds kTime(20);

/// The computation sleeps: on a busy machine that takes the requested time, unlike arithmetic.
double overlap_of(const std::function<comm::Work()>& start) {
  double percent = 0;
  comm::InitOptions config;
  config.timeout = std::chrono::seconds(60);
  comm::run_threads(1, config, [&](comm::Communicator& world) {
    const auto device = base::open_device({});
    comm::HostCollectives control(world, *device);
    percent = overlap_percent(
        measure_overlap(control, {.warmup = 1, .iterations = 9}, start, [] { std::this_thread::sleep_for(kTime); }));
  });
  return percent;
}

TEST(BenchOverlap, FormulaEqualsOsu) {
  EXPECT_DOUBLE_EQ(overlap_percent({100, 100, 100}), 100);
  EXPECT_DOUBLE_EQ(overlap_percent({100, 100, 150}), 50);
  EXPECT_DOUBLE_EQ(overlap_percent({100, 100, 200}), 0);
  EXPECT_DOUBLE_EQ(overlap_percent({100, 100, 230}), 0);
  EXPECT_DOUBLE_EQ(overlap_percent({0, 0, 0}), 0);
}

TEST(BenchOverlap, AsynchronousTimeIsHiddenAndBlockingTimeIsNot) {
  Timer timer;
  const double by_itself = overlap_of([&] {
    timer.begin(kTime);
    return comm::Work(&timer);
  });
  const double blocking = overlap_of([&] {
    std::this_thread::sleep_for(kTime);
    return comm::Work();
  });
  EXPECT_GT(by_itself, 60);
  EXPECT_LT(blocking, 40);
}

TEST(BenchOverlap, ComputationLastsAsConfigured) {
  const Computation computation;
  std::vector<double> samples;
  for (int i = 0; i < 31; ++i) {
    const std::int64_t start = base::host_time_ns();
    computation.run(500);
    samples.push_back(static_cast<double>(base::host_time_ns() - start) * 1e-3);
  }
  EXPECT_GT(bench_times(samples).min, 250);
  EXPECT_LT(bench_times(samples).min, 1000);
}

TEST(BenchCold, EvictedMemoryIsUnchangedAndSlowToRead) {
  ASSERT_TRUE(can_evict());
  std::vector<std::uint64_t> data(1 << 14);  // 128 KiB: in the second-level cache when warm
  std::iota(data.begin(), data.end(), 1);
  const auto read = [&](bool cold) {  // a chain of loads in an order that no prefetcher predicts
    std::vector<double> samples;
    for (int i = 0; i < 51; ++i) {
      std::uint64_t sum = std::accumulate(data.begin(), data.end(), std::uint64_t{0});
      EXPECT_EQ(sum, std::uint64_t{data.size()} * (data.size() + 1) / 2);
      if (cold) evict(std::as_bytes(std::span(data)));
      const std::int64_t start = base::host_time_ns();
      std::uint64_t at = 0;
      for (int k = 0; k < 2048; ++k) at = (at * 5 + 12345 + data[at] / (data.size() + 1)) % data.size();
      samples.push_back(static_cast<double>(base::host_time_ns() - start));
      EXPECT_LT(at, data.size());
    }
    return bench_times(samples).median;
  };
  const double warm = read(false);
  const double cold = read(true);
  EXPECT_GT(cold, 2 * warm) << "warm " << warm << " ns";
  EXPECT_LT(read(false), cold / 1.5) << "control: the same loop without the flush is fast again";
}

TEST(BenchCold, RunsByNameAndStaysCorrect) {
  BenchSpec plan{.ranks = 2,
                 .min_bytes = 64,
                 .max_bytes = 65536,
                 .factor = 32,
                 .check = true,
                 .iterations = 3,
                 .warmup = 1,
                 .cold = true,
                 .overlap = true};
  plan.ops = {&bench_op("all_reduce"), &bench_op("barrier")};
  comm::InitOptions config;
  config.timeout = std::chrono::seconds(60);
  std::vector<BenchRow> rows;
  comm::run_threads(2, config, [&](comm::Communicator& world) {
    run_bench(plan, world, *base::open_device({}), {.on_message = [&](const nlohmann::ordered_json& message) {
                if (message.contains("row")) rows.push_back(bench_row_from_json(message));
              }});
  });
  ASSERT_EQ(rows.size(), 4U);
  for (const BenchRow& row : rows) {
    EXPECT_EQ(row.out_of_place.wrong, std::uint64_t{0});
    ASSERT_TRUE(row.out_of_place.overlap_percent);
    EXPECT_GE(*row.out_of_place.overlap_percent, 0);
    EXPECT_FALSE(row.out_of_place.algorithm.empty());
    EXPECT_NE(row.out_of_place.algorithm, "auto");
  }
}

}  // namespace
}  // namespace tessera::tools
