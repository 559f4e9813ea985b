#include "tessera/plan/task_graph.h"

#include <gtest/gtest.h>

#include <array>

#include "tessera/base/error.h"

namespace tessera::plan {
namespace {

constexpr std::array<TaskId, 1> kOrigin{0};

TEST(TaskGraph, TaskBeginsAfterItsDependencies) {
  TaskGraph graph;
  const TaskId a = graph.add_work(10, kOrigin), b = graph.add_work(4, kOrigin);
  const TaskId both = graph.add_work(5, std::array{a, b});
  const auto times = graph.solve(nullptr);
  EXPECT_EQ(times[b].end_ns, 4);
  EXPECT_EQ(times[both].begin_ns, 10);
  EXPECT_EQ(times[both].end_ns, 15);
}

TEST(TaskGraph, JoinAddsNoTaskWhereOneIsLater) {
  TaskGraph graph;
  const TaskId a = graph.add_work(10, kOrigin);
  const TaskId b = graph.add_work(1, std::array{a});
  EXPECT_EQ(graph.join(a, b), b);
  EXPECT_EQ(graph.join(b, 0), b);
  const TaskId c = graph.add_work(20, kOrigin);
  const TaskId joined = graph.join(b, c);
  EXPECT_EQ(graph.solve(nullptr)[joined].end_ns, 20);
  EXPECT_EQ(graph.tasks().size(), 5U);
}

/// Transfers that each take 7 ns, one at a time.
class OneAtATime final : public TransferModel {
 public:
  void reset() override { queue_.clear(); }
  void start(std::uint32_t transfer, std::int64_t now) override {
    queue_.emplace_back(std::max(now, queue_.empty() ? 0 : queue_.back().first) + 7, transfer);
  }
  std::int64_t next_end() override { return queue_.empty() ? INT64_MAX : queue_.front().first; }
  std::uint32_t finish(std::int64_t) override {
    const std::uint32_t transfer = queue_.front().second;
    queue_.erase(queue_.begin());
    return transfer;
  }
  std::int64_t begun(std::uint32_t) const override { return 0; }

 private:
  std::vector<std::pair<std::int64_t, std::uint32_t>> queue_;
};

/// The second transfer is issued first but begins later: the order of time decides, not that of the calls.
TEST(TaskGraph, TransfersStartInOrderOfTime) {
  TaskGraph graph;
  const TaskId late = graph.add_work(10, kOrigin);
  const TaskId second = graph.add_transfer(0, std::array{late});
  const TaskId first = graph.add_transfer(1, kOrigin);
  OneAtATime model;
  const auto times = graph.solve(&model);
  EXPECT_EQ(times[first].end_ns, 7);
  EXPECT_EQ(times[second].end_ns, 17);
  EXPECT_THROW(graph.solve(nullptr), base::InvalidUsage);
}

TEST(TaskGraph, RejectsLaterDependencies) {
  TaskGraph graph;
  EXPECT_THROW(graph.add_work(1, std::array<TaskId, 1>{1}), base::InvalidUsage);
  EXPECT_THROW(graph.add_work(-1, kOrigin), base::InvalidUsage);
}

}  // namespace
}  // namespace tessera::plan
