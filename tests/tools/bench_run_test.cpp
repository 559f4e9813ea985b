// The measuring loop on ranks that are threads, and its reaction to wrong values.
#include "tools/bench/runner.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "tessera/base/error.h"
#include "tessera/comm/init.h"
#include "tests/harness/guarded_device.h"
#include "tools/bench/options.h"
#include "tools/bench/output.h"

namespace tessera::tools {
namespace {

using testing::HasSubstr;

/// The rows of a small run. `breaks`: the rank that changes one value of each result before the check; -1: none.
std::vector<BenchRow> rows_of(const BenchSpec& plan, int breaks,
                              const std::shared_ptr<base::DeviceRuntime>& device = base::open_device({})) {
  std::vector<BenchRow> rows;
  comm::InitOptions config;
  config.backend = "shm";
  config.timeout = std::chrono::seconds(60);
  config.deterministic = false;
  if (!device->host_accessible()) config.device = device;
  comm::run_threads(plan.ranks, config, [&](comm::Communicator& world) {
    BenchCallbacks callbacks{.on_message = [&](const nlohmann::ordered_json& message) {
      if (message.contains("row")) rows.push_back(bench_row_from_json(message));
    }};
    if (world.rank() == breaks)
      callbacks.before_check = [](comm::View out) {
        if (out.count != 0) static_cast<float*>(out.data)[out.count / 2] += 1;
      };
    run_bench(plan, world, *device, callbacks);
  });
  return rows;
}

BenchSpec small_plan(int ranks) {
  BenchSpec plan{.ranks = ranks,
                 .min_bytes = 4,
                 .max_bytes = 40000,
                 .factor = 100,
                 .root = ranks - 1,
                 .check = true,
                 .iterations = 3,
                 .warmup = 1};
  for (const BenchOp& op : bench_ops())
    if (ranks % 2 == 0 || op.exchange == Exchange::ring) plan.ops.push_back(&op);
  return plan;
}

TEST(BenchRun, OperationsAreCorrectInAndOutOfPlace) {
  for (const bool communicator_memory : {true, false}) {
    BenchSpec plan = small_plan(3);
    plan.communicator_memory = communicator_memory;
    const std::vector<BenchRow> rows = rows_of(plan, -1);
    ASSERT_EQ(rows.size(), 14U * 3 + 1);
    for (const BenchRow& row : rows) {
      const BenchOp& op = bench_op(row.out_of_place.op);
      EXPECT_EQ(row.in_place.has_value(), op.in_place) << op.name;
      for (const BenchResult* r : {&row.out_of_place, row.in_place ? &*row.in_place : &row.out_of_place}) {
        EXPECT_EQ(r->wrong, std::uint64_t{0}) << op.name << " " << r->bytes;
        EXPECT_EQ(r->memory, communicator_memory ? "communicator" : "ordinary");
        EXPECT_LE(r->time_us.min, r->time_us.median);
        EXPECT_LE(r->time_us.median, r->time_us.p99);
        EXPECT_LE(r->time_us.p99, r->time_us.max);
        EXPECT_GT(r->time_us.min, 0);
        EXPECT_DOUBLE_EQ(r->busbw_gbps, r->algbw_gbps * bus_factor(op, 3));
      }
    }
  }
}

TEST(BenchRun, MisalignedBuffersBeginOneElementLater) {
  BenchSpec plan = small_plan(2);
  plan.misaligned = true;
  for (const BenchRow& row : rows_of(plan, -1))
    for (const BenchResult* r : {&row.out_of_place, row.in_place ? &*row.in_place : &row.out_of_place})
      EXPECT_EQ(r->wrong, std::uint64_t{0}) << r->op << " " << r->bytes;
  for (const bool misaligned : {true, false}) {
    plan.ops = {&bench_op("all_reduce")};
    plan.misaligned = misaligned;
    comm::run_threads(2, {.backend = "shm"}, [&](comm::Communicator& world) {
      const BenchCallbacks callbacks{.before_check = [&](comm::View out) {
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(out.data) % 64, misaligned ? sizeof(float) : 0);
      }};
      run_bench(plan, world, *base::open_device({}), callbacks);
    });
  }
}

TEST(BenchRun, DetectsWrongValueAndReturnsCode1) {
  BenchSpec plan = small_plan(2);
  const std::vector<BenchRow> rows = rows_of(plan, 1);  // rank 1 is the root too
  BenchReport report(plan, false);
  for (const BenchRow& row : rows) {
    const BenchResult& r = row.out_of_place;
    const bool empty = bench_shape(bench_op(r.op), r.bytes, plan.dtype, 2, 1).out_count == 0 || r.op == "get";
    EXPECT_EQ(r.wrong, std::uint64_t{empty ? 0U : 1U}) << r.op << " " << r.bytes;
    if (row.in_place) {
      EXPECT_EQ(row.in_place->wrong, r.wrong) << r.op << " " << r.bytes;
    }
    report.add(row);
  }
  EXPECT_THAT(report.failure(), HasSubstr("the first in all_reduce of 4 bytes (out of place, backend shm): 1"));
  // main() exits with code 2 for InvalidUsage only: this is code 1, with its text as the last line.
  EXPECT_THROW(finish_bench({}, report), CheckFailed);
}

TEST(BenchRun, DeviceMemoryIsFilledMovedAndChecked) {
  for (const bool communicator_memory : {true, false}) {
    BenchSpec plan = small_plan(2);
    plan.communicator_memory = communicator_memory;
    if (!communicator_memory) plan.ops = {&bench_op("all_reduce")};
    std::erase_if(plan.ops, [](const BenchOp* op) {  // the device takes long for many messages; windows are of the host
      return messages_of(*op) == kWindow || op->exchange == Exchange::put || op->exchange == Exchange::get;
    });
    const auto device = harness::make_guarded_device({.lazy = true});
    for (const BenchRow& row : rows_of(plan, -1, device))
      for (const BenchResult* r : {&row.out_of_place, row.in_place ? &*row.in_place : &row.out_of_place}) {
        EXPECT_EQ(r->wrong, std::uint64_t{0}) << r->op << " " << r->bytes;
        EXPECT_GT(r->time_us.min, 0);
      }
  }
}

TEST(BenchRun, DetectsWrongValueOnDevice) {
  BenchSpec plan = small_plan(2);
  plan.ops = {&bench_op("all_gather"), &bench_op("reduce"), &bench_op("send_recv")};
  for (const BenchRow& row : rows_of(plan, 1, harness::make_guarded_device({.lazy = true}))) {
    const BenchResult& r = row.out_of_place;
    const bool empty = bench_shape(bench_op(r.op), r.bytes, plan.dtype, 2, 1).out_count == 0;
    EXPECT_EQ(r.wrong, std::uint64_t{empty ? 0U : 1U}) << r.op << " " << r.bytes;
  }
}

TEST(BenchRun, WithoutCheckReportsNoResult) {
  BenchSpec plan = small_plan(2);
  plan.check = false;
  plan.ops = {&bench_op("all_reduce")};
  BenchReport report(plan, false);
  std::string text;
  for (const BenchRow& row : rows_of(plan, 1)) {
    EXPECT_FALSE(row.out_of_place.wrong);
    text += report.add(row);
  }
  EXPECT_THAT(text + report.end(), HasSubstr("# Out of bounds values : N/A"));
  EXPECT_TRUE(report.json()["results"][0]["wrong"].is_null());
  EXPECT_NO_THROW(finish_bench({}, report));
}

BenchResult result_of(std::uint64_t bytes, double us, double bound_us) {
  return {.backend = "shm",
          .op = "all_reduce",
          .bytes = bytes,
          .dtype = "f32",
          .time_us = {us, us, us, us},
          .bound_us = bound_us,
          .rounds_us = {us, us, us}};
}

TEST(BenchRun, RoundsAreMediansOfPartsInTheOrderOfTime) {
  EXPECT_EQ(round_medians({1, 2, 3, 40, 5, 6, 7, 8, 90, 10}), (std::vector<double>{1.5, 21.5, 5.5, 7.5, 50}));
  EXPECT_EQ(round_medians({3, 1}), (std::vector<double>{3, 1}));
}

TEST(BenchRun, TableMarksRowsWhoseRoundsDisagree) {
  const BenchSpec plan = small_plan(2);
  BenchReport report(plan, false);
  BenchRow row{result_of(8, 1, 1), {}};
  EXPECT_THAT(report.add(row), testing::Not(HasSubstr("noisy")));
  row.out_of_place.noisy = true;
  row.out_of_place.rounds_us = {1.3, 165, 2};
  EXPECT_THAT(report.add(row), HasSubstr("# noisy: 8 bytes out of place: rounds took 1.30 to 165.00 us"));
}

TEST(BenchRun, VerdictNamesALimitOnlyIfTheRunShowsIt) {
  const std::uint64_t mib = 1 << 20;
  const auto limit = [](std::vector<BenchResult> results, const std::string& doubt = "") {
    return verdict_of(results, 2, doubt)->limit;
  };
  EXPECT_EQ(limit({result_of(64 * mib, 1000, 900)}), "memory");
  EXPECT_EQ(limit({result_of(64 * mib, 1000, 600)}), "unknown");
  EXPECT_EQ(limit({result_of(mib / 2, 1000, 900)}), "unknown");
  EXPECT_EQ(limit({result_of(64 * mib, 1000, 900)}, "other programs"), "unknown");
  BenchResult noisy = result_of(64 * mib, 1000, 900);
  noisy.noisy = true;
  EXPECT_EQ(limit({noisy}), "unknown");
  std::vector<BenchResult> flat, rising;
  for (std::uint64_t bytes = 8; bytes <= 8192; bytes *= 4) {
    flat.push_back(result_of(bytes, 20 + static_cast<double>(bytes) * 1e-4, 1));
    rising.push_back(result_of(bytes, 2 + static_cast<double>(bytes) * 1e-1, 1));
  }
  EXPECT_EQ(limit(flat), "latency");
  EXPECT_EQ(limit(rising), "unknown");
  EXPECT_FALSE(verdict_of(std::vector{result_of(0, 5, 0)}, 2, ""));
  EXPECT_FALSE(verdict_of(std::vector{result_of(mib, 5, 0)}, 1, ""));
}

TEST(BenchRun, LinkBetweenHostsIsTheLimitIfItsRateIsReached) {
  const auto host = [](const char* name, const nlohmann::ordered_json& mbit) {
    return nlohmann::ordered_json{
        {"name", name}, {"nics", {{{"name", "a"}, {"speed_mbit", mbit}}, {{"name", "b"}, {"speed_mbit", 1000}}}}};
  };
  const auto link = [](std::vector<nlohmann::ordered_json> hosts) { return nominal_link({{"hosts", hosts}}); };
  EXPECT_FALSE(link({host("x", 10000)})) << "one host";
  EXPECT_FALSE(link({host("x", 10000), {{"name", "y"}, {"nics", nlohmann::ordered_json::array()}}}));
  ASSERT_TRUE(link({host("x", 10000), host("y", 8000)}));
  EXPECT_EQ(link({host("x", 10000), host("y", 8000)})->name, "a of y, 8000 Mbit/s");
  EXPECT_EQ(link({host("x", 10000), host("y", nullptr)})->name, "b of y, 1000 Mbit/s");
  EXPECT_EQ(link({host("x", 10000), host("y", 100)})->name, "b of y, 1000 Mbit/s");
  const NominalLink one = *link({host("x", 10000), host("y", 8000)});
  EXPECT_DOUBLE_EQ(one.gbps, 1);
  BenchResult result = result_of(64 << 20, 1000, 900);  // memory could be the limit, if it were not for the link
  for (const auto& [gbps, limit] : {std::pair(0.9, "link"), {0.5, "unknown"}}) {
    result.busbw_gbps = gbps;
    const auto verdict = verdict_of(std::vector{result}, 2, "", one);
    EXPECT_EQ(verdict->limit, limit);
    EXPECT_THAT(verdict->text, HasSubstr(fmt::format("{:.2f} of the 1 that the link", gbps)));
  }
  EXPECT_EQ(verdict_of(std::vector{result}, 2, "")->limit, "memory");
}

TEST(BenchRun, OneRankWorks) {
  BenchSpec plan = small_plan(1);
  std::erase_if(plan.ops, [](const BenchOp* op) { return op->kind == comm::OpKind::send; });
  for (const BenchRow& row : rows_of(plan, -1))
    EXPECT_EQ(row.out_of_place.wrong, std::uint64_t{0}) << row.out_of_place.op;
}

TEST(BenchTimes, ArePercentiles) {
  std::vector<double> samples(200);
  std::iota(samples.rbegin(), samples.rend(), 1.0);
  const BenchTimes times = bench_times(samples);
  EXPECT_EQ(times.min, 1);
  EXPECT_EQ(times.median, 100.5);
  EXPECT_EQ(times.p99, 198) << "198 of 200 are not above it";
  EXPECT_EQ(times.max, 200);
  EXPECT_EQ(bench_times({5}).p99, 5);
  EXPECT_EQ(bench_times({3, 1, 2}).median, 2);
  EXPECT_THROW(bench_times({}), base::InvalidUsage);
}

TEST(BenchPlanOf, SizesGrowByFactorWithoutOverflow) {
  BenchSpec plan{.min_bytes = 8, .max_bytes = 100, .factor = 3};
  EXPECT_THAT(plan.sizes(bench_op("all_reduce")), testing::ElementsAre(8, 24, 72));
  EXPECT_THAT(plan.sizes(bench_op("barrier")), testing::ElementsAre(0));
  plan.min_bytes = plan.max_bytes = UINT64_MAX - 1;
  EXPECT_EQ(plan.sizes(bench_op("all_reduce")).size(), 1U);
}

TEST(BenchResultJson, ReadsBackExactly) {
  const BenchResult result{.backend = "shm",
                           .op = "reduce",
                           .bytes = 12,
                           .dtype = "bf16",
                           .time_us = {0.1, 1.0 / 3, 1e-7, 12345.678},
                           .algbw_gbps = 2.0 / 7,
                           .busbw_gbps = 3.3,
                           .wrong = 4,
                           .in_place = true,
                           .memory = "ordinary",
                           .algorithm = "direct",
                           .bound_us = 1e-9};
  const auto json = to_json(result);
  const auto again = bench_result_from_json(nlohmann::ordered_json::parse(json.dump()));
  EXPECT_EQ(to_json(again), json);
  EXPECT_EQ(again.time_us.p99, 1.0 / 3);
  EXPECT_EQ(again.wrong, std::uint64_t{4});
}

}  // namespace
}  // namespace tessera::tools
