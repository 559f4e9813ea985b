#include "tessera/plan/all_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "tessera/base/error.h"

namespace tessera::plan {
namespace {

using namespace comm;  // and of base
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr Device kMeta{DeviceType::meta, 0};

View shape_only(std::size_t count) {
  return {reinterpret_cast<void*>(std::uintptr_t{1} << 60), count, DType::f32,
          kMeta};  // NOLINT(performance-no-int-to-ptr)
}

/// 2 hosts of 2 ranks: 1 byte per ns everywhere.
Topology two_by_two() {
  Topology topology;
  topology.bytes_per_second = 1e9;
  topology.domains = {{.ranks = 2, .bytes_per_second = 1e9, .latency_s = 0}};
  topology.algorithms = AlgorithmTable("all_gather=ring,all_reduce=ring", simulated_algorithms());
  return topology;
}

/// Work of 1000 ns, an all_reduce of 4000 bytes over `axis` (0: the world, 1: the ranks of a host, 2: counterparts on
/// both hosts), work of 100 ns.
struct Program {
  explicit Program(const Topology& topology, int axis = 0) : world(make_world(4, clock, cluster(topology, 4))) {
    if (axis != 0) part = world->split(axis == 1 ? 2 : 1, 1);
    const View whole = shape_only(1000);
    clock.advance(*stream, 1000);
    (part ? *part : *world).all_reduce(whole, whole, ReduceOp::sum(), {.after = stream.get()}).wait_on(*stream);
    clock.advance(*stream, 60);
    clock.advance(*stream, 40);
  }
  std::vector<std::int64_t> ends(const Topology& topology, const Variation& variation = {}) {
    const std::array marks{clock.position(*stream)};
    std::vector<std::int64_t> all;
    for (const auto& rank : simulate_all_ranks(clock.graph(), transfers_of(*world), topology, 4, variation, marks))
      all.push_back(rank[0]);
    return all;
  }
  VirtualClock clock{VirtualClock::Machine::asynchronous};
  std::unique_ptr<Stream> stream = clock.make_stream(kMeta);
  std::unique_ptr<Communicator> world, part;
};

TEST(AllRanks, EqualRanksAreAsOneRepresentsThem) {
  const Topology topology = two_by_two();
  for (const int axis : {0, 1, 2}) {
    Program program(topology, axis);
    EXPECT_THAT(program.ends(topology), Each(program.clock.time_of(*program.stream))) << axis;
  }
  Program world(topology);
  EXPECT_EQ(world.clock.time_of(*world.stream), 1000 + 2 * 3000 + 100);
  Program across(topology, 2);  // two pairs share the hosts' cards
  EXPECT_EQ(across.clock.time_of(*across.stream), 1000 + 2 * 2 * 2000 + 100);
}

TEST(AllRanks, SlowRankHoldsUpItsGroup) {
  const Topology topology = two_by_two();
  const Variation slow{.slow_ranks = {{0, 3.0}}, .slow_hosts = {}};
  EXPECT_THAT(Program(topology).ends(topology, slow), ElementsAre(3000 + 6000 + 300, 9100, 9100, 9100));
  EXPECT_THAT(Program(topology, 1).ends(topology, slow), ElementsAre(3000 + 4000 + 300, 7100, 5100, 5100));
}

/// The pair of the fast rank uses the card alone until the slow rank's pair begins.
TEST(AllRanks, LateGroupLeavesTheLinkToOthers) {
  const Topology topology = two_by_two();
  const Variation slow{.slow_ranks = {{0, 11.0}}, .slow_hosts = {}};
  EXPECT_THAT(Program(topology, 2).ends(topology, slow), ElementsAre(11000 + 4000 + 1100, 5100, 15100, 5100));
}

TEST(AllRanks, SlowLinkHoldsUpOperationsThatCrossIt) {
  const Topology topology = two_by_two();
  const Variation slow{.slow_ranks = {}, .slow_hosts = {{1, 2.0}}};
  EXPECT_THAT(Program(topology).ends(topology, slow), Each(1000 + 2 * 6000 + 100));
  EXPECT_THAT(Program(topology, 1).ends(topology, slow), Each(5100));  // none of these crosses it
}

TEST(AllRanks, JitterIsRepeatableAndSlowsDown) {
  const Topology topology = two_by_two();
  const Variation jitter{.slow_ranks = {}, .slow_hosts = {}, .jitter = 0.1, .seed = 7};
  const auto ends = Program(topology).ends(topology, jitter);
  EXPECT_EQ(ends, Program(topology).ends(topology, jitter));
  EXPECT_GT(*std::min_element(ends.begin(), ends.end()), 7100);
  Variation other = jitter;
  other.seed = 8;
  EXPECT_NE(ends, Program(topology).ends(topology, other));
}

TEST(AllRanks, MergesChainsOfWork) {
  TaskGraph graph;
  const TaskId a = graph.add_work(1, std::array<TaskId, 1>{0});
  const TaskId b = graph.add_work(2, std::array{a});
  const TaskId c = graph.add_work(4, std::array{b});
  const TaskId d = graph.add_work(8, std::array{b});  // b has two: it stays
  std::array kept{c, d};
  const TaskGraph shorter = without_chains(graph, kept);
  EXPECT_EQ(shorter.tasks().size(), 4U);
  const auto times = shorter.solve(nullptr);
  EXPECT_EQ(times[kept[0]].end_ns, 7);
  EXPECT_EQ(times[kept[1]].end_ns, 11);
}

TEST(AllRanks, RejectsMissingRanksAndHosts) {
  const Topology topology = two_by_two();
  Program program(topology);
  EXPECT_THAT(
      [&] {
        program.ends(topology, {.slow_ranks = {{4, 2.0}}, .slow_hosts = {}});
      },
      ThrowsMessage<InvalidUsage>(HasSubstr("there are 4 ranks")));
  EXPECT_THAT(
      [&] {
        program.ends(topology, {.slow_ranks = {}, .slow_hosts = {{2, 2.0}}});
      },
      ThrowsMessage<InvalidUsage>(HasSubstr("there are 2 hosts")));
  EXPECT_THAT(
      [&] {
        program.ends(topology, {.slow_ranks = {{0, 0.0}}, .slow_hosts = {}});
      },
      ThrowsMessage<InvalidUsage>(HasSubstr("0.01 or more")));
}

}  // namespace
}  // namespace tessera::plan
