#include "tessera/plan/network.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "tessera/base/error.h"

namespace tessera::plan {
namespace {

using std::chrono::nanoseconds;
using testing::ElementsAre;

constexpr double kBytePerNanosecond = 1e9;

OpCost bytes_over(std::vector<LinkLoad> loads, double bytes, int latency_ns = 0) {
  return {{.loads = std::move(loads), .bytes = bytes, .latency = nanoseconds(latency_ns)}};
}

/// Transfers that begin at given times, and when they end.
class Timeline {
 public:
  Timeline(std::vector<double> links, LinkSharing sharing) : links_(std::move(links), sharing) {}
  void add(std::int64_t begin, OpCost cost) {
    const std::array<TaskId, 1> origin{0};
    const std::array begun{graph_.add_work(begin, origin)};
    ids_.push_back(graph_.add_transfer(links_.add(std::move(cost)), begun));
  }
  std::vector<std::int64_t> ends() {
    const auto times = graph_.solve(&links_);
    std::vector<std::int64_t> all;
    for (const TaskId id : ids_) all.push_back(times.at(id).end_ns);
    return all;
  }
  std::int64_t begun(std::uint32_t transfer) const { return links_.begun(transfer); }

 private:
  SharedLinks links_;
  TaskGraph graph_;
  std::vector<TaskId> ids_;
};

TEST(SharedLinks, EqualTransfersDivideBandwidth) {
  Timeline fair({kBytePerNanosecond}, LinkSharing::fair);
  fair.add(0, bytes_over({{0, 1000}}, 1000));
  fair.add(0, bytes_over({{0, 1000}}, 1000));
  EXPECT_THAT(fair.ends(), ElementsAre(2000, 2000));
  // The control: on links of their own they don't.
  Timeline apart({kBytePerNanosecond, kBytePerNanosecond}, LinkSharing::fair);
  apart.add(0, bytes_over({{0, 1000}}, 1000));
  apart.add(0, bytes_over({{1, 1000}}, 1000));
  EXPECT_THAT(apart.ends(), ElementsAre(1000, 1000));
}

TEST(SharedLinks, RatesChangeWhenTransferBeginsOrEnds) {
  Timeline fair({kBytePerNanosecond}, LinkSharing::fair);
  fair.add(0, bytes_over({{0, 1000}}, 1000, 50));
  fair.add(500, bytes_over({{0, 250}}, 250));
  // Alone until 500; then half the rate each: the second ends at 1000, the first has 250 bytes left.
  EXPECT_THAT(fair.ends(), ElementsAre(1250 + 50, 1000));
  EXPECT_EQ(fair.begun(1), 500);
}

TEST(SharedLinks, InOrderTransfersQueue) {
  Timeline queue({kBytePerNanosecond}, LinkSharing::in_order);
  queue.add(0, bytes_over({{0, 1000}}, 1000, 50));
  queue.add(500, bytes_over({{0, 250}}, 250, 50));
  EXPECT_THAT(queue.ends(), ElementsAre(1050, 1300));  // the latency of the first does not hold up the second
  EXPECT_EQ(queue.begun(0), 0);
  EXPECT_EQ(queue.begun(1), 1000);
}

/// Three transfers over two links: one crosses both. Max-min fair: the transfers of the link with the smaller share get
/// it, and what the crossing one leaves of the other link goes to the third.
TEST(SharedLinks, RatesAreMaxMinFair) {
  Timeline fair({kBytePerNanosecond, 2 * kBytePerNanosecond}, LinkSharing::fair);
  fair.add(0, bytes_over({{0, 1000}, {1, 1000}}, 1000));
  fair.add(0, bytes_over({{0, 1000}}, 1000));
  fair.add(0, bytes_over({{1, 3000}}, 3000));
  EXPECT_THAT(fair.ends(), ElementsAre(2000, 2000, 2000));  // rates 0.5, 0.5 and 1.5 bytes per ns
}

/// A host's link carries the bytes of all its ranks.
TEST(SharedLinks, LoadsMayExceedTheBytesOfOneRank) {
  Timeline fair({kBytePerNanosecond, 4 * kBytePerNanosecond}, LinkSharing::fair);
  fair.add(0, bytes_over({{0, 1000}, {1, 8000}}, 1000));
  EXPECT_THAT(fair.ends(), ElementsAre(2000));
}

TEST(SharedLinks, PhasesFollowEachOther) {
  for (const LinkSharing sharing : {LinkSharing::fair, LinkSharing::in_order}) {
    Timeline line({kBytePerNanosecond, kBytePerNanosecond / 2}, sharing);
    OpCost cost = bytes_over({{0, 1000}}, 1000, 10);
    cost.push_back(bytes_over({{1, 1000}}, 1000, 20)[0]);
    line.add(100, cost);
    EXPECT_THAT(line.ends(), ElementsAre(100 + 1010 + 2020));
  }
}

TEST(SharedLinks, RejectsMissingLinks) {
  EXPECT_THROW(SharedLinks({0}, LinkSharing::fair), base::InvalidUsage);
  SharedLinks links({1}, LinkSharing::fair);
  EXPECT_THROW(links.add(bytes_over({{1, 1}}, 1)), base::InvalidUsage);
}

}  // namespace
}  // namespace tessera::plan
