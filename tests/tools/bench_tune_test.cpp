// Which algorithm a tuning table selects for which sizes, and that the communicator reads it so.
#include "tools/bench/tuner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/algorithms.h"
#include "tools/bench/output.h"

namespace tessera::tools {
namespace {

using testing::ElementsAre;
using Range = comm::AlgorithmRange;

constexpr std::uint64_t kMiB = 1 << 20;

TEST(BenchTune, SelectsFasterAlgorithm) {
  const std::vector<AlgorithmTimes> times = {{"direct", {{8, 1.0}, {1024, 2.0}, {65536, 60}, {kMiB, 900}}},
                                             {"ring", {{8, 3.0}, {1024, 4.0}, {65536, 40}, {kMiB, 500}}}};
  EXPECT_THAT(choose_ranges(times), ElementsAre(Range{"direct", 0, 65536}, Range{"ring", 65536, UINT64_MAX}));
  EXPECT_EQ(algorithms_text("all_reduce", choose_ranges(times)), "all_reduce=direct:0-64K;ring:64K-max");
}

TEST(BenchTune, NoiseAddsNoRange) {
  std::vector<AlgorithmTimes> times = {{"direct", {{8, 1.0}, {64, 1.0}, {512, 1.0}, {kMiB, 100}}},
                                       {"ring", {{8, 0.96}, {64, 0.97}, {512, 0.5}, {kMiB, 101}}}};
  EXPECT_THAT(choose_ranges(times), ElementsAre(Range{"direct", 0, UINT64_MAX}))
      << "4% is nothing, and one size alone neither";
  times[1].us = {{8, 0.94}, {64, 0.94}, {512, 0.94}, {kMiB, 101}};
  EXPECT_EQ(choose_ranges(times).front().name, "ring") << "control: 6% is something";
  EXPECT_EQ(choose_ranges(times).size(), 1U) << "1% is too little to take it back";
}

TEST(BenchTune, SkipsUnsupportedAlgorithms) {
  const std::vector<AlgorithmTimes> times = {{"direct", {{8, 2.0}, {1024, 2.5}, {65536, 60}, {2 * kMiB, 900}}},
                                             {"symmetric", {{8, 1.0}, {1024, 1.0}}},
                                             {"huge", {{2 * kMiB, 100}}}};
  EXPECT_THAT(choose_ranges(times), ElementsAre(Range{"symmetric", 0, 1025}, Range{"direct", 1025, 2 * kMiB},
                                                Range{"huge", 2 * kMiB, UINT64_MAX}));
}

TEST(BenchTune, ShortMeasurementsAreNotExtrapolated) {
  const std::vector<AlgorithmTimes> times = {{"direct", {{8, 2.0}, {16384, 20}}},
                                             {"symmetric", {{8, 1.0}, {16384, 10}}}};
  EXPECT_EQ(algorithms_text("all_reduce", choose_ranges(times)), "all_reduce=symmetric:0-16385");
  EXPECT_TRUE(choose_ranges({}).empty());
  EXPECT_EQ(algorithms_text("all_gather", std::vector{Range{"direct", 0, UINT64_MAX}}), "all_gather=direct");
}

BenchResult result(const std::string& op, const std::string& algorithm, std::uint64_t bytes, double us) {
  return {.backend = "shm", .op = op, .bytes = bytes, .time_us = {us, us, us, us}, .algorithm = algorithm};
}

TEST(BenchTune, ReadsBackItsTable) {
  BenchSpec plan{.ranks = 2};
  plan.ops = {&bench_op("all_reduce"), &bench_op("all_gather")};
  AlgorithmTuner tuning(plan);
  const std::vector<std::string> known = {"all_reduce=direct", "all_reduce=ring", "all_gather=direct",
                                          "barrier=direct"};
  tuning.set_known(known);
  EXPECT_EQ(tuning.round(0), "all_reduce=direct,all_gather=direct");
  EXPECT_EQ(tuning.round(1), "all_reduce=ring");
  EXPECT_EQ(tuning.round(2), "");
  for (const auto& [bytes, us] : {std::pair<std::uint64_t, double>{8, 1}, {kMiB, 100}}) {
    tuning.add_default(result("all_reduce", "direct", bytes, us));
    tuning.add(result("all_reduce", "direct", bytes, us));
    tuning.add(result("all_gather", "direct", bytes, us));
  }
  tuning.add(result("all_reduce", "ring", 8, 2));
  tuning.add(result("all_reduce", "ring", kMiB, 50));
  EXPECT_EQ(tuning.json().dump(), R"({"all_reduce":"direct:0-1M;ring:1M-max","all_gather":"direct"})");
  const std::string text = tuning.json()["all_reduce"];
  const comm::AlgorithmTable table("all_reduce=" + text, known);
  EXPECT_EQ(table.choose(comm::OpKind::all_reduce, 8), "direct");
  EXPECT_EQ(table.choose(comm::OpKind::all_reduce, kMiB), "ring");
  EXPECT_THAT(tuning.table(), testing::HasSubstr("own choice"));
}

TEST(BenchSummary, MarksBestOfEachSize) {
  std::vector<BenchResult> results = {result("all_reduce", "direct", 8, 3), result("all_reduce", "direct", 64, 5)};
  for (BenchResult other : {results[0], results[1]}) {
    other.backend = "other";
    other.time_us.median = other.bytes == 8 ? 2 : 6;
    results.push_back(other);
  }
  results.push_back(result("broadcast", "direct", 8, 1));
  const std::string text = side_by_side(results);
  EXPECT_THAT(text, testing::ContainsRegex("all_reduce +8 +3.00 +2.00 \\*"));
  EXPECT_THAT(text, testing::ContainsRegex("all_reduce +64 +5.00 \\* +6.00"));
  EXPECT_THAT(text, testing::ContainsRegex("broadcast +8 +1.00 \\* +-"));
}

}  // namespace
}  // namespace tessera::tools
