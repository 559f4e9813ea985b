// What bench --cluster derives from its measurements, and how a plan uses them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "tessera/base/error.h"
#include "tessera/plan/topology.h"
#include "tessera/plan/world.h"
#include "tools/bench/machine.h"
#include "tools/bench/options.h"
#include "tools/plan/cluster_file.h"

namespace tessera::tools {
namespace {

using testing::DoubleNear;
using testing::ElementsAre;

TEST(HostOverhead, IsThatOfTheSamples) {
  std::vector<OverheadSample> samples;
  for (const double kernels : {1e-3, 4e-3, 20e-3}) samples.push_back({2 * kernels + 100 * 3e-6, kernels, 100});
  const HostOverhead overhead = fit_overhead(samples);
  EXPECT_NEAR(overhead.factor, 2, 1e-9);
  EXPECT_NEAR(overhead.latency_us, 3, 1e-6);
  samples.push_back({9, 1e-3, 100});
  EXPECT_NEAR(fit_overhead(samples).factor, 2, 1e-9) << "a step that another program interrupted";
  samples.resize(2);
  EXPECT_EQ(fit_overhead(samples).factor, 1) << "two samples determine nothing";
}

TEST(StepOverheads, AreThoseOfTheStrategyElseOfTheMedianOne) {
  StepOverhead overhead = fit_step_overhead(
      {{{"ddp", 44, 40, 2}, {"fsdp", 48.4, 44, 2}, {"zero1", 210, 42, 150}},  // the last one was interrupted
       {{"ddp", 3.3, 3, 0.3}, {"fsdp", 3.1, 3.1, -1}, {"zero1", 3.6, 3.2, 0.2}}});
  EXPECT_THAT(overhead.steps.at("ddp"), ElementsAre(testing::Pair(3, 3.3), testing::Pair(40, 44)));
  EXPECT_THAT(overhead.steps.at("zero1"), ElementsAre(testing::Pair(3.2, 3.6), testing::Pair(42, 210)));
  EXPECT_THAT(overhead.steps.at("others"), ElementsAre(testing::Pair(3.1, DoubleNear(3.1 * 1.1, 1e-9)),
                                                       testing::Pair(42, DoubleNear(42 * 1.1, 1e-9))));
  EXPECT_GT(overhead.late, 2 / 48.4);
  EXPECT_LT(overhead.late, 0.3 / 3.3);
}

/// Calls a kernel that takes `time`.
void call(KernelSampler& sampler, const char* name, double size, bool product, std::chrono::milliseconds time = {}) {
  const auto device = base::open_device({});
  const std::unique_ptr<base::Stream> stream = device->make_stream();
  nn::KernelInvocation call{.kernel = name, .dtype = base::DType::f32, .size = size, .product = {}};
  if (product) call.product = {1, 1, 1, 1};
  sampler.call(call, *stream, [time] { std::this_thread::sleep_for(time); });
}

TEST(KernelSampler, MediansOfMeansHaveRegularInterruptionsAndNoDisturbedRound) {
  const KernelSamples samples{.product = false, .seconds = {{8, {1, 1, 1, 5}}}};
  EXPECT_EQ(samples.medians().at(8), 1);
  EXPECT_EQ(samples.means().at(8), 2);
  std::array<KernelSampler, 3> rounds;
  for (std::size_t round = 0; round < rounds.size(); ++round) {
    rounds[round].turn(true);
    for (int i = 0; i < 4; ++i)
      call(rounds[round], "add", 8, false, std::chrono::milliseconds(round == 1 ? 30 : i == 3 ? 5 : 1));
  }
  const KernelTables kernels = means_of_rounds(rounds);
  EXPECT_THAT(kernels.at({"add", "f32"}).seconds.at(8), testing::SizeIs(3));
  EXPECT_THAT(kernels.at({"add", "f32"}).medians().at(8),
              testing::AllOf(testing::Ge(2e-3), testing::Lt(20e-3)));  // (1 + 1 + 1 + 5) / 4 ms; not 1, not 30
}

TEST(KernelSampler, CountsOnlyWhileItIsOn) {
  KernelSampler sampler;
  call(sampler, "linear_forward", 1e6, true);
  EXPECT_EQ(sampler.calls(), 0U);
  sampler.turn(true);
  for (const double size : {1e6, 1e6, 2e6}) call(sampler, "linear_forward", size, true);
  call(sampler, "add", 1e5, false);
  EXPECT_EQ(sampler.calls(), 4U);
  const std::vector<MeasuredKernel> tables = measured_kernels(sampler.kernels(), 1);
  ASSERT_EQ(tables.size(), 2U);
  EXPECT_EQ(tables[0].kernel, "add");
  ASSERT_EQ(tables[1].points.size(), 2U);
  EXPECT_EQ(tables[1].points[1].first, 2e6);
  EXPECT_EQ(measured_kernels(sampler.kernels(), 3)[1].points[0].second, 3 * tables[1].points[0].second);
  ComputeSpec compute;
  set_peaks(compute, sampler.kernels(), 1);
  EXPECT_THAT(compute.peak_flops, ElementsAre(testing::Key("f32")));
  EXPECT_GT(compute.memory_bytes_per_second, 0);
}

TEST(MeasuredLinks, GroupsAreTheDivisors) {
  EXPECT_THAT(group_sizes(2), ElementsAre(2));
  EXPECT_THAT(group_sizes(12), ElementsAre(2, 3, 4, 6, 12));
}

TEST(MeasuredLinks, LinkIsTheLineOfAllGather) {
  MeasuredCollective table{4, {}};
  for (const double bytes : {1e3, 1e5, 1e7}) table.points.emplace_back(bytes, 5 + bytes * 3 / 4 / 2e3);  // 2 GB/s
  const LinkSpec link = fit_link({{"all_gather", {{2, {{8, 1}}}, table}}}, 4);
  EXPECT_NEAR(link.latency_us, 5, 1e-6);
  EXPECT_NEAR(link.bytes_per_second, 2e9, 1);
  EXPECT_THROW(fit_link({{"all_gather", {table}}}, 2), base::InvalidUsage);
}

ClusterSpec measured_cluster() {
  ClusterSpec cluster{.name = "here", .hosts = 1, .ranks_per_host = 4, .intra = {1, 1e9}};
  cluster.compute.peak_flops = {{"f32", 1e11}};
  cluster.compute.memory_bytes_per_second = 1e10;
  cluster.compute.kernel_latency_us = 2;
  cluster.compute.kernels = {{"add", "f32", {{1e3, 1e-6}, {1e4, 1e-5}}}};
  cluster.measured["all_reduce"] = {{2, {{8, 10}, {1000, 20}}, {{8, 3}, {1000, 7}}}, {4, {{8, 30}, {1000, 50}}}};
  return cluster;
}

TEST(MeasuredCluster, EachNumberOfRanksHasItsTimes) {
  const SimulatedCluster simulated = simulate(measured_cluster(), 4);
  const auto us = [&](int ranks) {
    const plan::SimulatedOp operation{
        .kind = comm::OpKind::all_reduce, .bytes = 1000, .bytes_sent = 1000, .ranks = ranks, .members = {0, 1, ranks}};
    const auto time = plan::time_alone(simulated.network, simulated.network.cost(operation));
    return static_cast<double>(time.count()) / 1e3;
  };
  EXPECT_THAT(us(2), DoubleNear(20, 0.01));
  EXPECT_THAT(us(4), DoubleNear(50, 0.01));
}

/// Microseconds until two calls are done that begin together.
double both_done_us(const ClusterSpec& cluster) {
  plan::VirtualClock clock(plan::VirtualClock::Machine::asynchronous);
  const auto world = plan::make_world(2, clock, simulate(cluster, 2).network);
  const auto stream = clock.make_stream();
  float values[250] = {};
  const comm::View view{values, 250, base::DType::f32, {}};
  std::array<comm::Work, 2> calls = {world->all_reduce(view, view, comm::ReduceOp::sum()),
                                     world->all_reduce(view, view, comm::ReduceOp::sum())};
  for (comm::Work& call : calls) call.wait_on(*stream);
  return static_cast<double>(clock.time_of(*stream)) / 1e3;
}

TEST(MeasuredCluster, CallsInFlightAddTheirGap) {
  ClusterSpec cluster = measured_cluster();
  cluster.compute.kind = ComputeSpec::Kind::device;
  cluster.ranks_per_host = 2;
  cluster.sharing = PortSharing::in_order;
  cluster.measured["all_reduce"] = {{2, {{1000, 20}}, {}, {{1000, 5}}}};
  EXPECT_THAT(both_done_us(cluster), DoubleNear(25, 0.01));
  cluster.measured["all_reduce"][0].gap = {};
  EXPECT_THAT(both_done_us(cluster), DoubleNear(40, 0.01)) << "the negative control: one after the other";
  cluster.measured["all_reduce"][0].gap = {{1000, 30}};
  EXPECT_THAT(both_done_us(cluster), DoubleNear(40, 0.01)) << "a gap is at most the time of a call";
}

TEST(MeasuredCluster, CallsTakeTimeFromTheComputationWhereThatWasMeasured) {
  const SimulatedCluster simulated = simulate(measured_cluster(), 4);
  const auto busy_ns = [&](comm::OpKind kind, int ranks) {
    return simulated.network.busy({.kind = kind, .bytes = 1000, .bytes_sent = 1000, .ranks = ranks}).count();
  };
  EXPECT_EQ(busy_ns(comm::OpKind::all_reduce, 2), 7000);
  EXPECT_EQ(busy_ns(comm::OpKind::all_reduce, 4), 0);
  EXPECT_EQ(busy_ns(comm::OpKind::all_gather, 2), 0);
}

TEST(MeasuredCluster, KernelsStartAfterTheLatency) {
  const SimulatedCluster simulated = simulate(measured_cluster(), 4);
  nn::KernelInvocation call{.kernel = "add", .dtype = base::DType::f32, .size = 1e4, .product = {}};
  EXPECT_NEAR(simulated.kernels(call), 12e-6, 1e-12);
  call.kernel = "scale";  // not measured: the memory's rate
  EXPECT_NEAR(simulated.kernels(call), 3e-6, 1e-12);
}

}  // namespace
}  // namespace tessera::tools
