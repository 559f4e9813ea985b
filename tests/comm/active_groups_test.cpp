// Which groups a poll looks at.
#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <thread>
#include <vector>

#include "tessera/comm/core/progress.h"
#include "tests/comm/support.h"

namespace tessera::comm_test {
namespace {

using comm::ActiveGroups;

struct Counted final : comm::ActiveGroup {
  void begin() { in_flight_.fetch_add(1); }
  void end() { in_flight_.fetch_sub(1); }
  int looks = 0;
};

int poll(ActiveGroups& groups) {
  int looks = 0;
  groups.update();
  for (Counted* group = groups.first<Counted>(); group != nullptr; group = ActiveGroups::after(*group)) {
    ++looks;
    ++group->looks;
  }
  return looks;
}

TEST(ActiveGroups, PollsLookAtGroupsWithOperationsOnly) {
  ActiveGroups groups;
  std::deque<Counted> idle(300);
  Counted busy;
  for (Counted& group : idle) {
    group.begin();
    groups.activate(group);
    group.end();
  }
  busy.begin();
  groups.activate(busy);
  EXPECT_EQ(poll(groups), 301);  // they had operations a moment ago
  for (std::uint32_t i = 0; i < ActiveGroups::kIdlePolls; ++i) poll(groups);
  EXPECT_EQ(poll(groups), 1);
  EXPECT_EQ(busy.looks, static_cast<int>(ActiveGroups::kIdlePolls) + 2);
  idle[7].begin();
  groups.activate(idle[7]);
  EXPECT_EQ(poll(groups), 2);
  groups.remove(busy);
  EXPECT_EQ(poll(groups), 1);
  // The control: a group that is activated before its operation is counted is lost.
  Counted early;
  groups.activate(early);
  for (std::uint32_t i = 0; i <= ActiveGroups::kIdlePolls; ++i) poll(groups);
  early.begin();
  EXPECT_EQ(poll(groups), 1);
}

TEST(ActiveGroups, RemovesAGroupThatNoPollHasSeen) {
  ActiveGroups groups;
  Counted first, second;
  groups.activate(first);
  groups.activate(second);
  groups.remove(first);
  EXPECT_EQ(poll(groups), 1);
  EXPECT_EQ(second.looks, 1);
  groups.activate(first);
  EXPECT_EQ(poll(groups), 2);
}

/// Threads begin operations while the poll drops their groups as idle; each operation must be seen.
TEST(ActiveGroups, LoseNoOperationThatBeginsWhileItsGroupIsDropped) {
  constexpr int kThreads = 3;
  constexpr int kOperations = 20'000;
  struct Group final : comm::ActiveGroup {
    void begin() { in_flight_.fetch_add(1); }
    void end() { in_flight_.fetch_sub(1); }
    std::atomic<int> submitted{0};
    std::atomic<int> completed{0};
  };
  ActiveGroups groups;
  std::deque<Group> all(kThreads);
  std::atomic<int> running{kThreads};
  std::atomic<bool> lost{false};
  std::deque<std::thread> threads;
  for (Group& group : all)
    threads.emplace_back([&] {
      for (int i = 1; i <= kOperations && !lost; ++i) {
        group.begin();
        group.submitted.store(i);
        groups.activate(group);
        const auto until = std::chrono::steady_clock::now() + 20s;
        while (group.completed.load() != i && !lost) {
          if (std::chrono::steady_clock::now() > until) lost = true;
          std::this_thread::yield();
        }
      }
      --running;
    });
  while (running.load() != 0) {
    for (std::uint32_t i = 0; i < ActiveGroups::kIdlePolls; ++i) groups.update();
    for (Group* group = groups.first<Group>(); group != nullptr; group = ActiveGroups::after(*group)) {
      const int submitted = group->submitted.load();
      if (group->completed.load() == submitted) continue;
      group->end();
      group->completed.store(submitted);
    }
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(lost);
}

/// The progress thread may be about to poll when the last operation is done and the world ends. A race: where the
/// world is destroyed below the thread, this fails rarely.
TEST(ActiveGroups, WorldsEndBesideAPoll) {
  for (int world = 0; world < 300; ++world)
    comm::run_threads(2, {.backend = "shm"}, [world](comm::Communicator& ranks) {
      std::array<std::vector<float>, 4> values;
      std::vector<comm::Work> calls;
      for (std::vector<float>& each : values) {
        each.assign(std::size_t{1} << 18, 1);
        const comm::View view{each.data(), each.size(), base::DType::f32, {}};
        calls.push_back(ranks.all_reduce(view, view, comm::ReduceOp::sum()));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(10 * (world % 100)));  // the progress thread drives them
      calls.clear();
    });
}

}  // namespace
}  // namespace tessera::comm_test
