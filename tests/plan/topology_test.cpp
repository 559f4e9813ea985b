#include "tessera/plan/topology.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "tessera/base/error.h"
#include "tessera/comm/slow_link/ports.h"
#include "tests/plan/schedule_run.h"

namespace tessera::plan {
namespace {

using namespace comm;  // and of base
using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr double kRate = 1e9;         // bytes per second: one byte takes a nanosecond
constexpr double kLatency = 1000e-9;  // seconds

Topology one_switch() {
  Topology topology;
  topology.bytes_per_second = kRate;
  topology.latency_s = kLatency;
  return topology;
}

/// Hosts of `ranks` with one card each: as fast as a rank's port, ten times its latency.
Topology hosts_of(int ranks) {
  Topology topology = one_switch();
  topology.domains = {{.ranks = ranks, .bytes_per_second = kRate, .latency_s = 10 * kLatency}};
  return topology;
}

SimulatedOp operation(OpKind kind, int ranks, std::uint64_t bytes, int stride = 1) {
  return {.kind = kind, .bytes = bytes, .bytes_sent = 0, .ranks = ranks, .members = {0, stride, ranks}};
}

double microseconds(const Topology& topology, const SimulatedOp& op, std::string_view algorithm, int world = 0) {
  const int ranks = world == 0 ? op.members.stride * op.ranks : world;
  const auto time = time_alone(cluster(topology, ranks), collective_cost(topology, ranks, op, algorithm));
  return static_cast<double>(time.count()) / 1e3;
}

/// The same collective, its schedule run message by message.
double run_microseconds(OpKind kind, int ranks, std::size_t bytes, std::string_view algorithm) {
  ScheduleRun run({.kind = kind,
                   .dtype = DType::f32,
                   .ranks = ranks,
                   .count = bytes / 4,
                   .ordered = false,
                   .in_starts = {},
                   .out_starts = {}},
                  algorithm, {.bytes_per_second = kRate, .latency = [](int, int) { return kLatency; }});
  return static_cast<double>(run.time().count()) / 1e3;
}

struct Case {
  OpKind kind;
  const char* algorithm;
};

/// The closed formulas of the cost model are the times of the schedules in src/comm.
TEST(CollectiveCost, EqualsScheduleOnOneSwitch) {
  for (const auto& [kind, algorithm] : {Case{OpKind::all_gather, "direct"},
                                        {OpKind::all_gather, "ring"},
                                        {OpKind::all_gather, "recursive_doubling"},
                                        {OpKind::all_gather, "bruck"},
                                        {OpKind::reduce_scatter, "direct"},
                                        {OpKind::reduce_scatter, "recursive_halving"},
                                        {OpKind::all_reduce, "recursive_doubling"},
                                        {OpKind::broadcast, "binomial"},
                                        {OpKind::all_to_all, "direct"}})
    for (const int ranks : {2, 4, 8, 16})
      for (const std::size_t bytes : {std::size_t{1} << 10, std::size_t{1} << 14}) {  // short: in one segment
        const double expected = run_microseconds(kind, ranks, bytes, algorithm);
        EXPECT_NEAR(microseconds(one_switch(), operation(kind, ranks, bytes), algorithm), expected, 0.02 * expected)
            << name_of(kind) << " " << algorithm << " " << ranks << " " << bytes;
        // The control: other bytes take another time.
        EXPECT_GT(std::abs(microseconds(one_switch(), operation(kind, ranks, 8 * bytes), algorithm) - expected),
                  0.02 * expected)
            << name_of(kind) << " " << algorithm;
      }
}

/// Long data moves in segments, which overlap where a message is passed on: the formula is an upper bound.
TEST(CollectiveCost, BoundsPipelinedSchedules) {
  for (const auto& [kind, algorithm] : {Case{OpKind::all_reduce, "ring"},
                                        {OpKind::all_reduce, "rabenseifner"},
                                        {OpKind::all_reduce, "direct"},
                                        {OpKind::reduce_scatter, "ring"}})
    for (const int ranks : {4, 8}) {
      const double run = run_microseconds(kind, ranks, std::size_t{1} << 22, algorithm);
      const double formula = microseconds(one_switch(), operation(kind, ranks, std::uint64_t{1} << 22), algorithm);
      EXPECT_LE(run, formula * 1.02) << name_of(kind) << " " << algorithm << " " << ranks;
      EXPECT_GE(run, formula * 0.75) << name_of(kind) << " " << algorithm << " " << ranks;
    }
}

TEST(CollectiveCost, EqualsFormulas) {
  const double bytes = 1 << 20, us = 1e3;  // nanoseconds
  for (const int n : {2, 4, 8, 64, 1024}) {
    const double part = bytes * (n - 1) / n, rounds = std::log2(n);
    const auto time = [&](OpKind kind, const char* algorithm) {
      return us * microseconds(one_switch(), operation(kind, n, std::uint64_t{1} << 20), algorithm);
    };
    EXPECT_NEAR(time(OpKind::all_gather, "ring"), (n - 1) * 1000 + part, n);
    EXPECT_NEAR(time(OpKind::all_reduce, "ring"), 2 * ((n - 1) * 1000 + part), n);
    EXPECT_NEAR(time(OpKind::reduce_scatter, "recursive_halving"), rounds * 1000 + part, n);
    EXPECT_NEAR(time(OpKind::all_reduce, "rabenseifner"), 2 * (rounds * 1000 + part), n);
    EXPECT_NEAR(time(OpKind::all_reduce, "tree"), 2 * rounds * (1000 + bytes), n);
    EXPECT_NEAR(time(OpKind::all_gather, "direct"), 1000 + part, n);
    EXPECT_NEAR(time(OpKind::all_reduce, "direct"), 2 * (1000 + part), n);
    EXPECT_NEAR(time(OpKind::barrier, "dissemination"), rounds * 1000, n);
  }
}

/// Worked by hand: 2 hosts of 4 ranks, 8000 bytes in all, 1000 bytes a rank.
TEST(CollectiveCost, CountsWhatLeavesTheHost) {
  // Direct: each rank sends 3 parts inside; the 4 ranks of a host send 4 parts each through one card: 16,000 bytes.
  EXPECT_NEAR(microseconds(hosts_of(4), operation(OpKind::all_gather, 8, 8000), "direct"), 10 + 16, 1e-3);
  // A ring leaves each host once: 7000 bytes; of its 7 hops, 2 leave a host.
  EXPECT_NEAR(microseconds(hosts_of(4), operation(OpKind::all_gather, 8, 8000), "ring"), 5 * 1 + 2 * 10 + 7, 1e-3);
  // Doubling: 1000 and 2000 bytes inside, then 4 ranks send 4000 each.
  EXPECT_NEAR(microseconds(hosts_of(4), operation(OpKind::all_gather, 8, 8000), "recursive_doubling"),
              (1 + 1) + (1 + 2) + (10 + 16), 1e-3);
  // Hierarchical: 4 ranks send 1000 bytes each to the other host, then 6000 bytes inside.
  EXPECT_NEAR(microseconds(hosts_of(4), operation(OpKind::all_gather, 8, 8000), "hierarchical"), (10 + 4) + (3 + 6),
              1e-3);
  // Counterparts on both hosts: all four pairs use the card.
  EXPECT_NEAR(microseconds(hosts_of(4), operation(OpKind::all_gather, 2, 2000, 4), "ring"), 10 + 4, 1e-3);
  // Inside a host no card is used.
  EXPECT_NEAR(microseconds(hosts_of(4), operation(OpKind::all_gather, 4, 4000), "ring", 8), 3 * 1 + 3, 1e-3);
}

/// Racks of 2 hosts whose link out has half of what the hosts' cards have together.
TEST(CollectiveCost, OversubscribedRacksAreSlower) {
  Topology racks = hosts_of(4);
  racks.domains.push_back({.ranks = 8, .bytes_per_second = kRate, .latency_s = 20 * kLatency});
  // 16 ranks, 1000 bytes each, direct: 4 x 12 parts leave a host, 8 x 8 a rack.
  EXPECT_NEAR(microseconds(racks, operation(OpKind::all_gather, 16, 16000), "direct"), 20 + 64, 1e-3);
  racks.domains[1].bytes_per_second = 2 * kRate;  // the control: without oversubscription the hosts' cards are slowest
  EXPECT_NEAR(microseconds(racks, operation(OpKind::all_gather, 16, 16000), "direct"), 20 + 48, 1e-3);
}

/// The double binary tree has fewer messages in a row, the ring fewer bytes on each link.
TEST(CollectiveCost, VendorTakesTreeForShortAllReduce) {
  const auto time = [](std::uint64_t bytes, const char* algorithm) {
    return microseconds(hosts_of(8), operation(OpKind::all_reduce, 256, bytes), algorithm);
  };
  EXPECT_LT(time(1024, "vendor"), time(1024, "ring") / 5);
  EXPECT_DOUBLE_EQ(time(std::uint64_t{1} << 30, "vendor"), time(std::uint64_t{1} << 30, "ring"));
}

TEST(Topology, RejectsInvalidDomains) {
  Topology none = one_switch();
  none.bytes_per_second = 0;
  EXPECT_THAT([&] { cluster(none, 2); }, ThrowsMessage<InvalidUsage>(HasSubstr("rate above 0")));
  Topology odd = hosts_of(4);
  odd.domains.push_back({.ranks = 6, .bytes_per_second = 1, .latency_s = 0});
  EXPECT_THAT([&] { cluster(odd, 12); }, ThrowsMessage<InvalidUsage>(HasSubstr("6 ranks can't consist")));
}

// --- slow links have the same model

Topology linked_by(const SlowLinks& links, int ranks) {
  Topology topology;
  const SlowLink& near = links.hosts > 1 ? links.intra : links.link;
  topology.bytes_per_second = near.bytes_per_second;
  topology.latency_s = std::chrono::duration<double>(near.latency).count();
  const int per_host = ranks / links.hosts;
  if (links.hosts > 1)  // a card for every rank of a host
    topology.domains = {{.ranks = per_host,
                         .bytes_per_second = links.link.bytes_per_second * per_host,
                         .latency_s = std::chrono::duration<double>(links.link.latency).count()}};
  return topology;
}

TEST(SlowLink, OperationsCostWhatSimulatedOnesDo) {
  constexpr int kWorld = 8;
  constexpr std::size_t kBytes = 64'000;
  for (const int hosts : {1, 2, 4})
    for (const auto& [first, stride, ranks] : {std::array{0, 1, 8}, {4, 1, 4}, {1, 2, 4}, {0, 4, 2}, {6, 1, 2}})
      for (const OpKind kind : {OpKind::all_reduce, OpKind::all_gather, OpKind::reduce_scatter, OpKind::all_to_all,
                                OpKind::broadcast, OpKind::reduce}) {
        SCOPED_TRACE(testing::Message() << name_of(kind) << " " << hosts << " hosts, ranks " << first << " + " << stride
                                        << " x " << ranks);
        const SlowLinks links{.link = {20us, 2e6}, .intra = {5us, 50e6}, .hosts = hosts};
        const SimulatedOp operation{
            .kind = kind, .bytes = kBytes, .bytes_sent = 0, .ranks = ranks, .members = {first, stride, ranks}};
        const Topology topology = linked_by(links, kWorld);
        const OpCost cost = collective_cost(topology, kWorld, operation, "direct");
        ASSERT_EQ(cost.size(), 1u);
        std::vector<int> members;
        for (int i = 0; i < ranks; ++i) members.push_back(first + i * stride);
        OpDesc call{.kind = kind, .root = ranks - 1};
        call.in = {nullptr, kBytes, DType::u8, {}};
        call.out = {nullptr, kBytes, DType::u8, {}};
        const PortUse use = port_use({links, kWorld, members, ranks - 1}, {&call, 1});
        EXPECT_EQ(use.latency, cost[0].latency);
        std::array<double, kPorts> seconds{};
        for (const LinkLoad& load : cost[0].loads)
          seconds[load.link] =
              load.bytes / (load.link == 0 ? topology.bytes_per_second : topology.domains[0].bytes_per_second);
        for (std::size_t port = 0; port < kPorts; ++port)
          EXPECT_NEAR(std::chrono::duration<double>(use.occupied[port]).count(), seconds[port], 2e-9);
      }
}

}  // namespace
}  // namespace tessera::plan
