// Ranks that are processes: they find each other, and die in every way.
#include "tests/comm/process.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include "tests/comm/support.h"

namespace tessera::comm_test {
namespace {

using std::chrono::steady_clock;

std::string new_run() {
  static std::atomic<int> runs{0};
  return "test-" + std::to_string(::getpid()) + "-" + std::to_string(runs++);
}

Process start_rank(const std::string& run, int rank, int size, const std::string& mode,
                   const std::string& timeout = "20s", const std::string& setting = "") {
  std::vector<std::string> settings = {"TESSERA_RANK=" + std::to_string(rank),
                                       "TESSERA_WORLD_SIZE=" + std::to_string(size), "TESSERA_RUN_ID=" + run,
                                       "TESSERA_TIMEOUT=" + timeout};
  if (!setting.empty()) settings.push_back(setting);
  return {TESSERA_RANK_PROGRAM, std::move(settings), mode};
}

std::vector<Process> start_ranks(int size, const std::string& mode, const std::string& timeout = "20s",
                                 const std::string& setting = "") {
  std::vector<Process> ranks;
  const std::string run = new_run();
  for (int r = size; r-- > 0;) ranks.push_back(start_rank(run, r, size, mode, timeout, setting));  // rank 0 starts last
  std::reverse(ranks.begin(), ranks.end());
  return ranks;
}

const auto kBegun = std::filesystem::file_time_type::clock::now();

/// Counts files of runs that a process of these tests wrote. Other runs may be in progress, and older ones
/// may have left files of processes whose pids are reused.
int files_left() {
  int files = 0;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator("/tmp/tessera-" + std::to_string(::geteuid()), none)) {
    std::error_code gone;
    if (entry.last_write_time(gone) < kBegun || gone) continue;
    std::ifstream file(entry.path());
    std::string magic;
    std::string socket;
    std::string token;
    pid_t writer = 0;
    file >> magic >> socket >> token >> writer;
    files += static_cast<int>(Process::started().count(writer));
  }
  return files;
}

void expect_nothing_left() { EXPECT_EQ(files_left(), 0); }

TEST(ProcessWorld, RanksConnectAndLeaveNoFiles) {
  for (const int size : {2, 4}) {
    std::vector<Process> ranks = start_ranks(size, "once");
    for (Process& rank : ranks) EXPECT_EQ(rank.line(), "ready");
    for (Process& rank : ranks) EXPECT_EQ(rank.exit_code(), 0);
  }
  expect_nothing_left();
}

// Windows whose addresses agree in these bits evict each other from AMD's first-level caches, line by line.
TEST(ProcessWorld, MapsWindowsAtDifferentCacheColors) {
  std::vector<Process> ranks = start_ranks(4, "windows");
  for (Process& rank : ranks) {
    std::istringstream line(rank.line());
    const std::vector<int> colors(std::istream_iterator<int>(line), {});
    EXPECT_EQ(colors.size(), 4u);  // a window in several blocks, or none, would make the test void
    EXPECT_EQ(std::set<int>(colors.begin(), colors.end()).size(), colors.size());
  }
  for (Process& rank : ranks) EXPECT_EQ(rank.exit_code(), 0);
}

class EachBackend : public testing::TestWithParam<const char*> {
 protected:
  static void expect_lines(const char* mode, const std::string& line) {
    std::vector<Process> ranks = start_ranks(2, mode, "20s", GetParam());
    for (Process& rank : ranks) EXPECT_EQ(rank.line(), line) << mode;
    for (Process& rank : ranks) EXPECT_EQ(rank.exit_code(), 0) << mode;
  }
};

TEST_P(EachBackend, ClosedStreamsBecomeNoDescriptorOfTheLibrary) {
  expect_lines("closed", "/dev/null /dev/null /dev/null right");
}
TEST_P(EachBackend, ForkedChildrenDoNothingToTheirParent) { expect_lines("fork", "right"); }
TEST_P(EachBackend, SignalsReachTheProgram) { expect_lines("signal", "right"); }
TEST_P(EachBackend, LocalesOfRanksMayDiffer) { expect_lines("locale", "right"); }
TEST_P(EachBackend, ExitEndsCommunicatorsThatAreNeverDestroyed) { expect_lines("abandon", "right"); }
TEST_P(EachBackend, AbortInSignalHandlerDoesNotHang) {
  for (int round = 0; round < 3; ++round) {
    std::vector<Process> ranks = start_ranks(2, "handler", "60s", GetParam());
    for (Process& rank : ranks) ASSERT_EQ(rank.line(), "ready");
    ::usleep(50'000);
    ranks[0].kill(SIGUSR1);
    for (Process& rank : ranks) EXPECT_EQ(rank.line(5s), "Aborted: rank 0 aborted: signal");
  }
}
INSTANTIATE_TEST_SUITE_P(Each, EachBackend, testing::Values("TESSERA_BACKEND=shm", "TESSERA_BACKEND=tcp"));

TEST(ProcessWorld, UnreadableMemoryIsThatOfItsRankInTheWorld) {
  std::vector<Process> ranks = start_ranks(2, "unreadable", "20s", "TESSERA_BACKEND=shm");
  const std::string said = ranks[0].line();  // of the reader; the sender is rank 0 of their group
  EXPECT_NE(said.find("gather"), std::string::npos) << said;
  EXPECT_NE(said.find("can't read the memory of rank 1 (process "), std::string::npos) << said;
  EXPECT_NE(said.find("TESSERA_CMA=0"), std::string::npos) << said;
}

TEST(ProcessWorld, LimitOfFileSizesIsRespected) {
  std::vector<Process> ranks = start_ranks(2, "limit 2000000000", "20s", "TESSERA_BACKEND=shm");
  for (Process& rank : ranks) EXPECT_EQ(rank.line(), "right");
  for (Process& rank : ranks) EXPECT_EQ(rank.exit_code(), 0);
  ranks = start_ranks(2, "limit 1000000", "20s", "TESSERA_BACKEND=shm");
  for (Process& rank : ranks)
    EXPECT_EQ(rank.line(),
              "SystemError: shm: a segment needs 33554432 bytes, but the limit of file sizes is 1000000 (ulimit -f "
              "counts KiB); raise it, or use another backend");
  ranks = start_ranks(2, "limit 1000000", "20s", "TESSERA_BACKEND=tcp");  // needs no segment
  for (Process& rank : ranks) EXPECT_EQ(rank.line(), "right");
}

TEST(ProcessWorld, SettingOfOneRankIsAnErrorOfAll) {
  const std::string run = new_run();
  std::vector<Process> ranks;
  for (int r = 0; r < 2; ++r)
    ranks.push_back(start_rank(run, r, 2, "once", "20s", r == 1 ? "TESSERA_ALGO=all_reduce=direct" : ""));
  for (Process& rank : ranks) {
    EXPECT_EQ(rank.line(),
              "InvalidUsage: init: TESSERA_ALGO differs between the ranks: it is unset on rank 0; all_reduce=direct on "
              "rank 1; choose the same on all ranks");
    EXPECT_EQ(rank.exit_code(), 3);
  }
}

class MixedMemory : public testing::TestWithParam<const char*> {};

TEST_P(MixedMemory, IsTransferredAndReleasedAtCompletion) {
  for (const int size : {2, 3, 4}) {
    std::vector<Process> ranks = start_ranks(size, "mixed", "60s", GetParam());
    for (Process& rank : ranks) EXPECT_EQ(rank.line(), "right");
    for (Process& rank : ranks) EXPECT_EQ(rank.exit_code(), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Each, MixedMemory, testing::Values("TESSERA_CMA=1", "TESSERA_CMA=0", "TESSERA_CHECK=1"));

class KilledRank : public testing::TestWithParam<int> {};

TEST_P(KilledRank, IsNamedByOthersWithinSeconds) {
  const int victim = GetParam();
  std::vector<Process> ranks = start_ranks(3, "loop");
  for (Process& rank : ranks) ASSERT_EQ(rank.line(), "ready");
  const auto start = steady_clock::now();
  ranks[static_cast<std::size_t>(victim)].kill(SIGKILL);
  for (int r = 0; r < 3; ++r) {
    if (r == victim) continue;
    const std::string error = ranks[static_cast<std::size_t>(r)].line();
    EXPECT_TRUE(error.starts_with("PeerLost: all_reduce")) << error;
    EXPECT_NE(error.find("rank " + std::to_string(victim) + " died"), std::string::npos) << error;
    EXPECT_EQ(ranks[static_cast<std::size_t>(r)].exit_code(), 3);
  }
  EXPECT_LT(steady_clock::now() - start, 5s);
  expect_nothing_left();
}
INSTANTIATE_TEST_SUITE_P(Each, KilledRank, testing::Values(0, 1, 2));

class KilledRankOnDevice : public testing::TestWithParam<std::tuple<int, const char*>> {};

TEST_P(KilledRankOnDevice, IsNamedByWaitingRanks) {
  const auto victim = static_cast<std::size_t>(std::get<0>(GetParam()));
  const std::string kind = std::get<1>(GetParam());
  std::vector<Process> ranks = start_ranks(3, "device " + kind);
  for (Process& rank : ranks) ASSERT_EQ(rank.line(), "ready " + kind);
  ranks[victim].kill(SIGKILL);
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (r == victim) continue;
    const std::string error = ranks[r].line();
    EXPECT_TRUE(error.starts_with("PeerLost: all_reduce")) << error;
    EXPECT_NE(error.find("rank " + std::to_string(victim) + " died"), std::string::npos) << error;
    EXPECT_EQ(ranks[r].exit_code(), 3);
  }
  expect_nothing_left();
}
INSTANTIATE_TEST_SUITE_P(Each, KilledRankOnDevice,
                         testing::Combine(testing::Values(0, 1, 2), testing::Values("ipc", "direct")));

TEST(ProcessWorld, StoppedRankOnDeviceIsNamedAtDeadline) {
  std::vector<Process> ranks = start_ranks(3, "device ipc", "2s");
  for (Process& rank : ranks) ASSERT_EQ(rank.line(), "ready ipc");
  ranks[1].kill(SIGSTOP);
  for (const std::size_t r : {0U, 2U}) {
    const std::string error = ranks[r].line();
    EXPECT_TRUE(error.starts_with("Timeout: all_reduce: ")) << error;
    EXPECT_NE(error.find("rank 1 is not responding"), std::string::npos) << error;
    EXPECT_EQ(ranks[r].exit_code(), 3);
  }
}

TEST(ProcessWorld, LeavesNoDeviceMemoryOpen) {
  std::vector<Process> ranks = start_ranks(4, "device leave");
  for (Process& rank : ranks) EXPECT_EQ(rank.line(), "right");
  // Each rank imported one window of every other rank; the window was freed after all had closed it.
  for (Process& rank : ranks) EXPECT_EQ(rank.line(), "exported 0, imported 0 of 3, freed too early 0");
  for (Process& rank : ranks) EXPECT_EQ(rank.exit_code(), 0);
}

// Control: a rank that leaves with an error does not wait for the others, and its windows remain exported.
TEST(ProcessWorld, RankThatFailsKeepsItsWindows) {
  std::vector<Process> ranks = start_ranks(2, "device throw");
  for (Process& rank : ranks) EXPECT_EQ(rank.line(), "right");
  EXPECT_EQ(ranks[1].line(), "exported 1, imported 0 of 1, freed too early 0");
  EXPECT_EQ(ranks[1].line(), "other: mine");
  EXPECT_EQ(ranks[0].line(), "exported 1, imported 0 of 1, freed too early 0");
}

class StoppedRank : public testing::TestWithParam<int> {};

TEST_P(StoppedRank, IsNamedAtDeadline) {
  const int victim = GetParam();
  std::vector<Process> ranks = start_ranks(3, "loop", "2s");
  for (Process& rank : ranks) ASSERT_EQ(rank.line(), "ready");
  ranks[static_cast<std::size_t>(victim)].kill(SIGSTOP);
  for (int r = 0; r < 3; ++r) {
    if (r == victim) continue;
    const std::string error = ranks[static_cast<std::size_t>(r)].line();
    EXPECT_TRUE(error.starts_with("Timeout: all_reduce #")) << error;
    EXPECT_NE(error.find("not done within 2s"), std::string::npos) << error;
    EXPECT_NE(error.find("rank " + std::to_string(victim) + " is not responding"), std::string::npos) << error;
    EXPECT_EQ(error.find("rank " + std::to_string(3 - victim - r) + " is not responding"), std::string::npos) << error;
    EXPECT_EQ(ranks[static_cast<std::size_t>(r)].exit_code(), 3);
  }
  ranks[static_cast<std::size_t>(victim)].kill(SIGCONT);  // the rank resumes in a world that has failed
  const std::string error = ranks[static_cast<std::size_t>(victim)].line();
  EXPECT_TRUE(error.starts_with("Timeout: ") || error.starts_with("PeerLost: ")) << error;
  EXPECT_EQ(ranks[static_cast<std::size_t>(victim)].exit_code(), 3);
  expect_nothing_left();
}
INSTANTIATE_TEST_SUITE_P(Each, StoppedRank, testing::Values(0, 1));

struct LettingGo {
  const char* mode;
  const char* error;
};

/// If a rank comes to read memory that its owner has freed, the reported cause is what made the owner free it.
class PeerFailure : public testing::TestWithParam<LettingGo> {};

TEST_P(PeerFailure, MemoryReleasedByFailedPeerIsItsFailure) {
  const bool death = std::string(GetParam().mode).ends_with("death");
  std::vector<Process> ranks = start_ranks(death ? 3 : 2, GetParam().mode);
  if (death) {
    ASSERT_EQ(ranks[2].line(), "called");
    ranks[2].kill(SIGKILL);
  }
  const std::string cause = ranks[1].line();
  EXPECT_TRUE(cause.starts_with(GetParam().error)) << cause;
  ranks[0].say("");
  EXPECT_EQ(ranks[0].line(), cause);
}
INSTANTIATE_TEST_SUITE_P(Each, PeerFailure,
                         testing::Values(LettingGo{"let go message timeout",
                                                   "Timeout: send to rank 0: not done within"},
                                         LettingGo{"let go message abort", "Aborted: rank 1 aborted: enough"},
                                         LettingGo{"let go collective timeout", "Timeout: all_gather #1: not done"},
                                         LettingGo{"let go collective abort", "Aborted: rank 1 aborted: enough"},
                                         LettingGo{"let go collective death", "PeerLost: all_gather #1: rank 2 died"}),
                         [](const auto& given) {
                           std::string name = given.param.mode;
                           std::replace(name.begin(), name.end(), ' ', '_');
                           return name;
                         });

/// A rank that exits without destroying its communicator still hears of others' deaths, in a thread of the library.
TEST(ProcessWorld, ExitsWithLivingCommunicator) {
  const std::string run = new_run();
  std::vector<Process> ranks;
  for (int r = 0; r < 3; ++r) ranks.push_back(start_rank(run, r, 3, "exit"));
  for (Process& one : ranks) EXPECT_EQ(one.line(), "ready");
  for (int r = 0; r < 2; ++r) {
    ranks[static_cast<std::size_t>(r)].say("go");
    EXPECT_EQ(ranks[static_cast<std::size_t>(r)].line(), "exits");
  }
  ::usleep(300'000);  // handlers of exit() have freed what libraries own; the last one waits
  ranks[2].kill(SIGKILL);
  for (int r = 0; r < 2; ++r) EXPECT_EQ(ranks[static_cast<std::size_t>(r)].exit_code(), 0) << "rank " << r;
}

TEST(ProcessWorld, NamesMissingRank) {
  const std::string run = new_run();
  Process zero = start_rank(run, 0, 3, "once", "700ms");
  Process two = start_rank(run, 2, 3, "once", "5s");
  const std::string expected =
      "Timeout: init: of 3 ranks, rank 1 did not connect within 700ms (launcher tessera, run '" + run + "')";
  EXPECT_EQ(zero.line(), expected);
  EXPECT_EQ(two.line(), expected);
  Process alone = start_rank(new_run(), 1, 2, "once", "300ms");
  EXPECT_NE(alone.line().find("found no rank 0 within 300ms"), std::string::npos);
  expect_nothing_left();
}

TEST(ProcessWorld, ReplacesFileOfDeadRunOnly) {
  const std::string run = new_run();
  {
    Process dies = start_rank(run, 0, 2, "once");
    for (int i = 0; i < 30'000 && files_left() == 0; ++i) ::usleep(1000);
    Process second = start_rank(run, 0, 2, "once");
    EXPECT_NE(second.line().find("is starting a run with the same name"), std::string::npos);
  }
  EXPECT_EQ(files_left(), 1);  // the file of the process that was killed while it waited
  Process zero = start_rank(run, 0, 2, "once");
  Process one = start_rank(run, 1, 2, "once");
  EXPECT_EQ(zero.line(), "ready");
  EXPECT_EQ(one.line(), "ready");
  EXPECT_EQ(zero.exit_code(), 0);
  EXPECT_EQ(one.exit_code(), 0);
  expect_nothing_left();
}

TEST(ProcessWorld, RejectsIncompleteVariables) {
  Process rank(TESSERA_RANK_PROGRAM, {"TESSERA_RANK=1"}, "once");
  EXPECT_NE(rank.line().find("InvalidUsage: tessera launcher: TESSERA_RANK=1, TESSERA_WORLD_SIZE is not set"),
            std::string::npos);
}

TEST(ProcessWorld, RejectsRanksOfOtherWorlds) {
  const std::string run = new_run();
  Process zero = start_rank(run, 0, 2, "once");
  Process one = start_rank(run, 1, 3, "once");
  EXPECT_NE(zero.line().find("rank 1 was started as one of 3 ranks, rank 0 as one of 2"), std::string::npos);
  EXPECT_NE(one.line().find("rank 1 was started as one of 3 ranks"), std::string::npos);
}

}  // namespace
}  // namespace tessera::comm_test
