#include "tessera/plan/world.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <array>

#include <numeric>

namespace tessera::plan {
namespace {

using namespace comm;  // and of base
using std::chrono::nanoseconds;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr Device kMeta{DeviceType::meta, 0};

/// `count` f32 values that no code may read.
View shape_only(std::size_t count, std::uintptr_t at = std::uintptr_t{1} << 60) {
  return {reinterpret_cast<void*>(at), count, DType::f32, kMeta};  // NOLINT(performance-no-int-to-ptr)
}

View part_of(const View& view, int parts) {
  View part = view;
  part.count = view.count / static_cast<std::size_t>(parts);
  part.data = static_cast<std::byte*>(view.data) + (view.bytes() - part.bytes());  // the last part: the rank's own
  return part;
}

struct Simulated {
  explicit Simulated(int ranks, Network network = alpha_beta(nanoseconds(1000), 1e9))
      : world(make_world(ranks, clock, std::move(network))) {}
  VirtualClock clock{VirtualClock::Machine::asynchronous};
  std::unique_ptr<Stream> stream = clock.make_stream(kMeta);
  std::unique_ptr<Communicator> world;
};

TEST(Simulation, SaysThatItIsOne) {
  Simulated s(4);
  EXPECT_EQ(s.world->backend(), "sim");
  EXPECT_TRUE(s.world->capabilities().moves_nothing);
}

TEST(Simulation, DetachesButHasNoCallbacks) {
  Simulated s(4);
  const View whole = shape_only(4000);
  Work work = s.world->all_gather(part_of(whole, 4), whole);
  EXPECT_THAT([&] { work.on_done([](const std::exception_ptr&) {}); },
              ThrowsMessage<Unsupported>(HasSubstr("a simulation end in virtual time")));
  work.detach();
  EXPECT_TRUE(work.done());
  s.world->barrier().wait_on(*s.stream);
  EXPECT_GE(s.clock.time_of(*s.stream), 1000 + 3 * 4000);  // the detached operation took its time
}

TEST(Simulation, CostsLatencyAndBytes) {
  Simulated s(4);
  const View whole = shape_only(4000);
  s.world->all_gather(part_of(whole, 4), whole).wait_on(*s.stream);
  EXPECT_EQ(s.clock.time_of(*s.stream), 1000 + 3 * 4000);  // three peers receive 4000 bytes at 1 byte/ns
  s.world->all_reduce(whole, whole, ReduceOp::sum(), {.after = s.stream.get()}).wait_on(*s.stream);
  EXPECT_EQ(s.clock.time_of(*s.stream), 13000 + 2 * 1000 + 2 * 12000);
  EXPECT_EQ(s.clock.host_time(), 0);
  EXPECT_EQ(s.world->traffic().of(OpKind::all_gather).bytes_sent, 12000u);
  EXPECT_EQ(s.world->traffic().of(OpKind::all_reduce).bytes_sent, 24000u);
  EXPECT_THAT(s.world->traffic().bytes_to_peer, ElementsAre(12000, 12000, 12000, 0));
}

TEST(Simulation, TransfersHaveTheLabelsOfTheirCalls) {
  Simulated s(4);
  const View whole = shape_only(4000);
  s.world->all_gather(part_of(whole, 4), whole, {.label = "h.0"}).wait_on(*s.stream);
  s.world->all_reduce(whole, whole, ReduceOp::sum()).wait_on(*s.stream);
  const std::vector<TransferRecord> transfers = transfers_of(*s.world);
  ASSERT_EQ(transfers.size(), 2u);
  EXPECT_EQ(transfers[0].label, "h.0");
  EXPECT_EQ(transfers[1].label, "");
  EXPECT_LT(transfers[0].task, transfers[1].task);
}

TEST(Simulation, CallsTakeTimeFromTheHostWhileTheOperationProceeds) {
  for (const std::int64_t busy : {0, 700, 9000}) {
    Network network = alpha_beta(nanoseconds(1000), 1e9);
    if (busy > 0) network.busy = [busy](const SimulatedOp&) { return nanoseconds(busy); };
    Simulated s(2, network);
    const View whole = shape_only(1000);
    Work work = s.world->all_gather(part_of(whole, 2), whole);  // 1000 ns, then 2000 bytes
    EXPECT_EQ(s.clock.host_time(), busy);
    work.wait();
    EXPECT_EQ(s.clock.host_time(), std::max<std::int64_t>(busy, 3000));
  }
}

TEST(Simulation, OperationsWaitForStream) {
  Simulated s(2);
  s.clock.advance(*s.stream, 500);
  const View whole = shape_only(1000);
  auto other = s.clock.make_stream(kMeta);
  s.world->all_gather(part_of(whole, 2), whole, {.after = s.stream.get()}).wait_on(*other);
  EXPECT_EQ(s.clock.time_of(*other), 500 + 1000 + 2000);
  EXPECT_EQ(s.clock.time_of(*s.stream), 500);  // the stream computes meanwhile
}

TEST(Simulation, OrdersOperationsWithinCommunicator) {
  for (const bool in_order : {true, false}) {
    Network network = alpha_beta(nanoseconds(1000), 1e9);
    network.in_order = in_order;
    Simulated s(2, network);
    const auto channel = s.world->split(0, 1);
    const View whole = shape_only(1000);
    auto second = s.clock.make_stream(kMeta), beside = s.clock.make_stream(kMeta);
    auto first_work = s.world->all_gather(part_of(whole, 2), whole);
    s.world->all_gather(part_of(whole, 2), whole).wait_on(*second);
    channel->all_gather(part_of(whole, 2), whole).wait_on(*beside);
    first_work.wait_on(*s.stream);
    EXPECT_EQ(s.clock.time_of(*s.stream), 3000);
    EXPECT_EQ(s.clock.time_of(*second), in_order ? 6000 : 3000);
    EXPECT_EQ(s.clock.time_of(*beside), 3000);
  }
}

TEST(Simulation, SplitsLikeMesh) {
  Simulated s(12);  // 3 x 4; this is its last rank
  EXPECT_EQ(s.world->rank(), 11);
  const auto shards = s.world->split(8, 3), replicas = s.world->split(3, 2);
  EXPECT_EQ(shards->size(), 4);
  EXPECT_EQ(shards->rank(), 3);
  EXPECT_EQ(replicas->size(), 3);
  EXPECT_EQ(s.world->split(-1, 0), nullptr);
  const auto group = s.world->create_group(std::array{3, 7, 11});
  EXPECT_EQ(group->size(), 3);
  EXPECT_EQ(group->rank(), 2);
  EXPECT_EQ(s.world->create_group(std::array{11})->size(), 1);
  for (const std::array<int, 3> members : {std::array{3, 6, 11}, std::array{11, 7, 3}, std::array{1, 11, 5}})
    EXPECT_THAT([&] { s.world->create_group(members); }, ThrowsMessage<InvalidUsage>(HasSubstr("equal distances")));
  EXPECT_THAT([&] { s.world->split(0, 12); }, ThrowsMessage<InvalidUsage>(HasSubstr("key 12")));
}

TEST(Simulation, HostCollectivesAssumeEqualRanks) {
  Simulated s(3);
  std::vector<float> mine = {1, 2}, all(6, 0), sum(2, 0), part(1, 0), three = {4, 5, 6};
  s.world->all_gather(comm::view_of(std::as_const(mine).data(), 2), comm::view_of(all.data(), 6)).wait();
  EXPECT_THAT(all, ElementsAre(1, 2, 1, 2, 1, 2));
  s.world->all_reduce(comm::view_of(std::as_const(mine).data(), 2), comm::view_of(sum.data(), 2), ReduceOp::sum())
      .wait();
  EXPECT_THAT(sum, ElementsAre(3, 6));
  s.world->all_reduce(comm::view_of(sum.data(), 2), comm::view_of(sum.data(), 2), ReduceOp::avg()).wait();
  EXPECT_THAT(sum, ElementsAre(3, 6));
  s.world->reduce_scatter(comm::view_of(std::as_const(three).data(), 3), comm::view_of(part.data(), 1), ReduceOp::sum())
      .wait();
  EXPECT_THAT(part, ElementsAre(18));  // the last part
  std::vector<float> swapped(3, 0);
  s.world->all_to_all(comm::view_of(std::as_const(three).data(), 3), comm::view_of(swapped.data(), 3)).wait();
  EXPECT_THAT(swapped, Each(6.0F));
  EXPECT_GT(s.clock.host_time(), 0);  // the host has waited
  EXPECT_THAT([&] { s.world->recv(comm::view_of(swapped.data(), 3), 0); },
              ThrowsMessage<Unsupported>(HasSubstr("recv: a simulation has no values of other ranks")));
  // If the other ranks' parts have other lengths, there is no data to derive them from.
  const std::vector<std::size_t> counts = {0, 1, 2};
  EXPECT_THAT(
      [&] {
        s.world->all_gather_v(comm::view_of(std::as_const(mine).data(), 2), comm::view_of(swapped.data(), 3), counts);
      },
      ThrowsMessage<Unsupported>(HasSubstr("parts of equal length")));
}

TEST(Simulation, UsesMeasuredTimes) {
  std::map<OpKind, CostTable> tables;
  tables[OpKind::all_gather].add(1000, 1e-6);
  tables[OpKind::all_gather].add(3000, 2e-6);
  Simulated s(2, measured(tables));
  const View whole = shape_only(500);
  s.world->all_gather(part_of(whole, 2), whole).wait_on(*s.stream);
  EXPECT_EQ(s.clock.time_of(*s.stream), 1500);
  EXPECT_THAT([&] { s.world->barrier(); }, ThrowsMessage<InvalidUsage>(HasSubstr("barrier has no measured cost")));
}

TEST(Simulation, OneRankCostsNoTime) {
  Simulated s(1);
  const View whole = shape_only(100);
  s.world->all_reduce(whole, whole, ReduceOp::sum()).wait_on(*s.stream);
  EXPECT_EQ(s.clock.time_of(*s.stream), 0);
}

TEST(Simulation, EndsWithAbort) {
  Simulated s(2);
  const auto channel = s.world->split(0, 1);
  s.world->abort("enough");
  EXPECT_THAT([&] { channel->barrier(); }, ThrowsMessage<Aborted>(HasSubstr("enough")));
}

TEST(Simulation, RejectsInvalidNetwork) {
  VirtualClock clock(VirtualClock::Machine::synchronous);
  EXPECT_THROW(alpha_beta(nanoseconds(-1), 1), InvalidUsage);
  EXPECT_THROW(alpha_beta(nanoseconds(1), 0), InvalidUsage);
  EXPECT_THROW(make_world(0, clock, alpha_beta(nanoseconds(1), 1)), InvalidUsage);
}

}  // namespace
}  // namespace tessera::plan
