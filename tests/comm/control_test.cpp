// Control channels between real processes, which die, hang and leave. Each test runs over a Unix socket on one host and
// over TESSERA_MASTER between processes that claim to be on several hosts, as a star and as a tree.
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "tests/comm/control_ranks.h"
#include "tests/comm/support.h"

namespace tessera::comm_test {
namespace {

using std::chrono::steady_clock;

/// Worlds of 3 ranks form a chain, larger ones a tree in which a rank has 2 children.
struct Over {
  bool master = false;
  bool tree = false;
};

class ControlPlane : public testing::TestWithParam<Over> {
 protected:
  static std::vector<Process> start(int size, const std::string& timeout = "20s") {
    const int fan_out = !GetParam().tree ? 0 : size > 3 ? 2 : 1;
    return start_ranks({size, std::to_string(fan_out), GetParam().master, timeout});
  }
};
INSTANTIATE_TEST_SUITE_P(Over, ControlPlane, testing::Values(Over{}, Over{true}, Over{false, true}, Over{true, true}),
                         [](const auto& row) {
                           return std::string(row.param.master ? "Master" : "UnixSocket") +
                                  (row.param.tree ? "Tree" : "");
                         });

TEST_P(ControlPlane, MessagesReachTheirReceivers) {
  std::vector<Process> ranks = start(3);
  ranks[1].say("tell 2 a");
  EXPECT_EQ(ranks[2].line(), "told test 1 1 a");
  ranks[2].say("tell 0 b");
  EXPECT_EQ(ranks[0].line(), "told test 2 1 b");
  ranks[0].say("tell 1 c");
  EXPECT_EQ(ranks[1].line(), "told test 0 1 c");
  ranks[1].say("tell -1 d");  // all other ranks
  EXPECT_EQ(ranks[0].line(), "told test 1 1 d");
  EXPECT_EQ(ranks[2].line(), "told test 1 1 d");
  ranks[1].say("tell 1 nobody");
  ranks[1].say("tell 7 nobody");
  ranks[2].say("tell 1 e");
  EXPECT_EQ(ranks[1].line(), "told test 2 1 e");
}

TEST_P(ControlPlane, RanksKnowTheirHosts) {
  std::vector<Process> ranks = start(2);
  for (Process& rank : ranks) {
    rank.say("where");
    EXPECT_EQ(rank.line(), GetParam().master ? "at 127.0.0.1 of 2 hosts" : "at 127.0.0.1 of 1 hosts");
  }
}

TEST_P(ControlPlane, MessagesKeepTheirOrder) {
  constexpr int kMessages = 500;
  std::vector<Process> ranks = start(3);
  ranks[0].say("flood -1 500 40");
  ranks[1].say("flood -1 500 200");
  std::map<std::string, int> next;
  for (int i = 0; i < 2 * kMessages; ++i) {
    std::istringstream words(ranks[2].line());
    std::string event;
    std::string channel;
    std::string from;
    int bytes = 0;
    int number = -1;
    words >> event >> channel >> from >> bytes >> number;
    ASSERT_EQ(number, next[from]++) << "from " << from;
  }
  EXPECT_EQ(next["0"], kMessages);
  EXPECT_EQ(next["1"], kMessages);
}

TEST_P(ControlPlane, ChannelsAreIndependent) {
  std::vector<Process> ranks = start(2);
  for (Process& rank : ranks) rank.say("open second");
  for (Process& rank : ranks) EXPECT_EQ(rank.line(), "opened second");
  ranks[0].say("say second 1 x");
  ranks[0].say("say test 1 y");
  EXPECT_EQ(ranks[1].line(), "told second 0 1 x");
  EXPECT_EQ(ranks[1].line(), "told test 0 1 y");
  ranks[1].say("close second");
  EXPECT_EQ(ranks[1].line(), "closed second");
  ranks[0].say("say second 1 into the void");
  ranks[0].say("say test 1 z");
  EXPECT_EQ(ranks[1].line(), "told test 0 1 z");
  for (Process& rank : ranks) rank.say(&rank == &ranks[0] ? "close second" : "open second");  // the name is free again
  EXPECT_EQ(ranks[0].line(), "closed second");
  ranks[0].say("open second");
  for (Process& rank : ranks) EXPECT_EQ(rank.line(), "opened second");
}

TEST_P(ControlPlane, TruncatesLongMessages) {
  std::vector<Process> ranks = start(2);
  ranks[0].say("flood 1 1 65000");
  EXPECT_TRUE(ranks[1].line().starts_with("told test 0 65000 0"));
  ranks[0].say("flood 1 1 65001");
  EXPECT_TRUE(ranks[1].line().starts_with("told test 0 65000 0"));
}

/// Events of connections that were closed during the rendezvous must not be attributed to other connections.
TEST_P(ControlPlane, ReportsNoLiveRankAsLost) {
  for (int i = 0; i < 5; ++i) {
    std::vector<Process> ranks = start(3);
    for (Process& rank : ranks) EXPECT_EQ(rank.line(i == 0 ? 500ms : 100ms), "");
  }
}

TEST_P(ControlPlane, ReportsKilledRankWithinSecond) {
  for (const int victim : {0, 2}) {
    std::vector<Process> ranks = start(4);
    const auto start = steady_clock::now();
    ranks[static_cast<std::size_t>(victim)].kill(SIGKILL);
    for (int r = 0; r < 4; ++r) {
      if (r == victim) continue;
      EXPECT_EQ(ranks[static_cast<std::size_t>(r)].line(), "lost " + std::to_string(victim) + " on test");
    }
    EXPECT_LT(steady_clock::now() - start, 1s);
    if (victim == 0) continue;
    ranks[1].say("tell 3 still");  // the other ranks continue
    EXPECT_EQ(ranks[3].line(), "told test 1 5 still");
  }
}

TEST_P(ControlPlane, ReportsEachLostRankOnce) {
  std::vector<Process> ranks = start(4);
  // In the tree rank 1 connects rank 3 with the others.
  for (const int victim : GetParam().tree ? std::array{2, 0, 1} : std::array{1, 2, 0}) {
    ranks[static_cast<std::size_t>(victim)].kill(SIGKILL);
    EXPECT_EQ(ranks[3].line(), "lost " + std::to_string(victim) + " on test");
  }
  EXPECT_EQ(ranks[3].line(500ms), "");
}

/// A death is detected in two ways; each test disables the other one.
TEST_P(ControlPlane, ClosedConnectionIsLoss) {
  std::vector<Process> ranks = start(3);
  ranks[2].say("hang-up");
  EXPECT_EQ(ranks[0].line(1s), "lost 2 on test");
  EXPECT_EQ(ranks[1].line(1s), "lost 2 on test");
}
TEST_P(ControlPlane, EndedProcessIsLossWithOpenConnection) {
  std::vector<Process> ranks = start(3);
  ranks[2].say("fork");
  EXPECT_EQ(ranks[2].line(), "forked");
  const auto start = steady_clock::now();
  ranks[2].kill(SIGKILL);
  EXPECT_EQ(ranks[0].line(), "lost 2 on test");
  EXPECT_EQ(ranks[1].line(), "lost 2 on test");
  EXPECT_LT(steady_clock::now() - start, 1s);
}

TEST_P(ControlPlane, GracefulCloseIsNoLoss) {
  for (const int first : {0, 1}) {
    std::vector<Process> ranks = start(3);
    ranks[static_cast<std::size_t>(first)].end_input();
    EXPECT_EQ(ranks[static_cast<std::size_t>(first)].exit_code(), 0);
    EXPECT_EQ(ranks[2].line(700ms), "") << "rank " << first << " said goodbye";
    ranks[static_cast<std::size_t>(1 - first)].kill(SIGKILL);  // control: this rank left without a farewell
    const std::string loss = "lost " + std::to_string(1 - first) + " on test";
    // Rank 1 of the chain has separated the other two.
    EXPECT_EQ(ranks[2].line(first == 1 && GetParam().tree ? 700ms : 20s), first == 1 && GetParam().tree ? "" : loss);
  }
}

TEST_P(ControlPlane, AllRanksMayCloseAtOnce) {
  std::vector<Process> ranks = start(4);
  const auto start = steady_clock::now();
  for (Process& rank : ranks) rank.end_input();
  for (Process& rank : ranks) {
    EXPECT_EQ(rank.exit_code(), 0);
    EXPECT_EQ(rank.line(), "");
  }
  EXPECT_LT(steady_clock::now() - start, 900ms) << "somebody waited for the farewell's deadline";
}

/// Resident memory in MiB.
long memory_of(const Process& process) {
  std::ifstream file("/proc/" + std::to_string(process.pid()) + "/statm");
  long size = 0;
  long resident = 0;
  file >> size >> resident;
  return resident * ::sysconf(_SC_PAGESIZE) >> 20;
}

/// By how much a rank may grow, in MiB, whose messages a stopped rank doesn't read: the queue holds 16.
#ifdef __SANITIZE_THREAD__
constexpr long kMostGrowth = 160;  // this sanitizer keeps four bytes beside each byte of the program
#else
constexpr long kMostGrowth = 40;
#endif

/// Rank 1 sends 86 MiB to a stopped rank, which reads nothing. Whether a rank reads does not tell whether it is alive.
void flood_a_stopped_rank(std::vector<Process> ranks, int victim) {
  ranks[static_cast<std::size_t>(victim)].kill(SIGSTOP);
  const long before = memory_of(ranks[1]);
  const long hub_before = memory_of(ranks[0]);
  ranks[1].say("flood " + std::to_string(victim) + " 1500 60000 1");
  const std::string line = ranks[1].line(60s);
  int longest = -1;
  ASSERT_EQ(std::sscanf(line.c_str(), "flooded %d", &longest), 1) << line;
  EXPECT_LT(longest, 1000);  // for one call; this machine may be busy
  EXPECT_LT(memory_of(ranks[1]) - before, kMostGrowth);
  if (victim == 0) return;
  EXPECT_LT(memory_of(ranks[0]) - hub_before, kMostGrowth);
  ranks[1].say("tell 0 alive");
  EXPECT_EQ(ranks[0].line(), "told test 1 5 alive");
}

TEST_P(ControlPlane, StoppedRankDelaysNoOther) {
  for (const int victim : {0, 2}) flood_a_stopped_rank(start(3), victim);
}

TEST_P(ControlPlane, SlowHubIsNotLost) {
  std::atomic<bool> done{false};
  std::vector<std::thread> busy;
  for (int i = 0; i < 4; ++i)
    busy.emplace_back([&] {
      while (!done.load()) {
      }
    });
  flood_a_stopped_rank(start(3), 2);
  done.store(true);
  for (std::thread& one : busy) one.join();
}

TEST_P(ControlPlane, ChannelThatNotAllRanksOpenIsError) {
  std::vector<Process> ranks = start(2, "1s");
  ranks[1].say("open more");
  EXPECT_EQ(ranks[1].line(), "Timeout: init: not all ranks opened the control channel 'more' within 1s");
  EXPECT_EQ(ranks[1].exit_code(), 3);
  ranks = start(2);
  ranks[0].say("open more");
  ranks[1].kill(SIGKILL);
  std::string line = ranks[0].line();
  if (line == "lost 1 on test") line = ranks[0].line();
  EXPECT_EQ(line, "PeerLost: init: control channel 'more' can't be opened: rank 1 died");
}

}  // namespace
}  // namespace tessera::comm_test
