// Descriptors that pass between the ranks of one host.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <thread>

#include "tessera/comm/bootstrap/socket.h"
#include "tests/comm/rendezvous.h"

namespace tessera::comm_test {
namespace {

ino_t inode_of(int fd) {
  struct stat status = {};
  return ::fstat(fd, &status) == 0 ? status.st_ino : 0;
}

std::size_t open_descriptors() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(files), end(files)));
}

/// Runs `body` on ranks that are threads with a Unix socket each, as processes on one host have. Returns their errors.
std::vector<std::string> run_on_host(int ranks, const std::function<void(Bootstrap&)>& body) {
  static std::atomic<int> runs{0};
  const std::string job = "descriptors-" + std::to_string(::getpid()) + "-" + std::to_string(runs++);
  std::vector<std::string> errors(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      const Launch launch{.launcher = "test", .rank = r, .size = ranks, .local_size = ranks, .job = job};
      errors[static_cast<std::size_t>(r)] =
          error_of([&] { body(*rendezvous({.launch = launch, .timeout = 20s, .secret = Bootstrap::Token{}})); });
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

TEST(Descriptors, PassOverConnectionsThatCarryNone) {
  const std::vector<Outcome> all = rendezvous_all(3, free_port());
  ASSERT_NO_FATAL_FAILURE(assert_complete(all));
  std::vector<std::future<std::string>> done;
  const std::array<UniqueFd, 3> own = {listen_on_port(0), listen_on_port(0), listen_on_port(0)};
  for (const Outcome& one : all)
    done.push_back(std::async(std::launch::async, [&] {
      return error_of([&] {
        for (int i = 0; i < 2; ++i) {
          int next = 0;
          const std::array mine = {own[static_cast<std::size_t>(one.bootstrap->rank())].get()};
          one.bootstrap->all_gather_fds(mine, [&](int rank, std::span<UniqueFd> theirs) {
            EXPECT_EQ(rank, next++);
            ASSERT_EQ(theirs.size(), 1U);
            EXPECT_EQ(inode_of(theirs[0].get()), inode_of(own[static_cast<std::size_t>(rank)].get()));
          });
          EXPECT_EQ(next, 3);
        }
      });
    }));
  for (auto& one : done) EXPECT_EQ(one.get(), "");
}

/// 40 ranks are more than two batches, the last of which is not full. Each passes 8, which all end in this process.
TEST(Descriptors, OnlyThoseOfOneBatchAreOpen) {
  constexpr std::size_t kRanks = 40;
  constexpr std::size_t kEach = Bootstrap::kMaxDescriptors;
  const UniqueFd file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const std::vector<int> own(kEach, file.get());
  allow_descriptors(20'000);
  std::atomic<std::size_t> before{0};
  std::atomic<std::size_t> most{0};
  const std::vector<std::string> errors = run_on_host(kRanks, [&](Bootstrap& bootstrap) {
    bootstrap.all_gather({});
    if (bootstrap.rank() == 0) before = open_descriptors();
    bootstrap.all_gather({});
    std::size_t seen = 0;
    bootstrap.all_gather_fds(own, [&](int, std::span<UniqueFd> theirs) {
      for (const UniqueFd& fd : theirs) seen += inode_of(fd.get()) == inode_of(file.get()) ? 1 : 0;
      if (bootstrap.rank() == 0) most = std::max(most.load(), open_descriptors());
    });
    EXPECT_EQ(seen, kRanks * kEach);
    bootstrap.all_gather({});
    if (bootstrap.rank() == 0) {
      EXPECT_LE(open_descriptors(), before.load() + 2) << "they were not closed";
    }
    bootstrap.all_gather({});
  });
  EXPECT_EQ(errors, std::vector<std::string>(kRanks));
  EXPECT_LE(most.load(), before.load() + kRanks * 16 * kEach + 16) << "more than a batch";
  EXPECT_GT(most.load(), before.load() + 16) << "nothing was measured";
}

TEST(Descriptors, RanksPassDifferentNumbersAndKeepWhatTheyMove) {
  const std::vector<std::string> errors = run_on_host(3, [&](Bootstrap& bootstrap) {
    const UniqueFd file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    const std::vector<int> own(static_cast<std::size_t>(bootstrap.rank()), file.get());  // rank 0 has none
    UniqueFd kept;
    int closed = -1;
    bootstrap.all_gather_fds(own, [&](int rank, std::span<UniqueFd> theirs) {
      EXPECT_EQ(theirs.size(), static_cast<std::size_t>(rank));
      if (rank != 2) return;
      kept = std::move(theirs[0]);
      closed = theirs[1].get();
    });
    EXPECT_EQ(inode_of(kept.get()), inode_of(file.get()));
    EXPECT_GE(closed, 0);
  });
  EXPECT_EQ(errors, std::vector<std::string>(3));
}

TEST(Descriptors, ErrorOfOneRankIsThatOfAll) {
  for (const int failing : {0, 18}) {
    const std::vector<std::string> errors = run_on_host(20, [&](Bootstrap& bootstrap) {
      const std::array own = {STDERR_FILENO};
      bootstrap.all_gather_fds(own, [&](int rank, std::span<UniqueFd>) {
        EXPECT_FALSE(bootstrap.rank() == failing && rank > 3) << "used after its error";
        if (bootstrap.rank() == failing && rank == 3) throw SystemError("shm: can't map a segment");
      });
    });
    const std::string expected = "SystemError: rank " + std::to_string(failing) + ": shm: can't map a segment";
    EXPECT_EQ(errors, std::vector<std::string>(20, expected));
  }
}

TEST(Descriptors, TooManyAreRefused) {
  EXPECT_EQ(run_on_host(1,
                        [](Bootstrap& bootstrap) {
                          const std::vector<int> own(Bootstrap::kMaxDescriptors + 1, STDERR_FILENO);
                          bootstrap.all_gather_fds(own, [](int, std::span<UniqueFd>) {});
                        }),
            std::vector<std::string>{"InvalidUsage: bootstrap: a rank passes at most 8 descriptors"});
}

std::array<Connection, 2> connected_pair() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) != 0)
    throw system_error("socketpair");
  return {Connection(UniqueFd(ends[0])), Connection(UniqueFd(ends[1]))};
}

Deadline soon() { return steady_clock::now() + 5s; }

TEST(Descriptors, RefusalReachesWaitingRank) {
  std::array<Connection, 2> ends = connected_pair();
  ends[0].send_refusal(PeerLost("init: rank 3 of 4 was lost"), soon());
  std::string counts(16, '\0');
  EXPECT_EQ(error_of([&] { ends[1].receive_descriptors(counts, soon()); }), "PeerLost: init: rank 3 of 4 was lost");
}

TEST(Descriptors, LimitOfOpenFilesIsNamed) {
  std::array<Connection, 2> ends = connected_pair();
  const std::vector<int> fds(3, STDERR_FILENO);
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const UniqueFd next(::dup(STDERR_FILENO));
  const rlimit one_more{static_cast<rlim_t>(next.get()) + 2, before.rlim_max};
  std::string counts(2, '\0');
  for (const bool limited : {true, false}) {
    ends[0].send_descriptors(fds, std::string("\2\1", 2), soon());
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, limited ? &one_more : &before), 0);
    const std::string error = error_of([&] { EXPECT_EQ(ends[1].receive_descriptors(counts, soon()).size(), 3U); });
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
    EXPECT_EQ(error.find("3 descriptors were received; raise the limit of open files (ulimit -n)") != std::string::npos,
              limited)
        << error;
  }
  EXPECT_EQ(counts, std::string("\2\1", 2));
  ends[0].send_descriptors(fds, std::string("\2\2", 2), soon());  // announces one that doesn't come
  EXPECT_NE(error_of([&] { ends[1].receive_descriptors(counts, soon()); }), "");
}

/// The kernel limits the descriptors of an ordinary user that no process has received yet. Returns 0 if a sender waits
/// until others have received theirs.
int send_beyond_the_limit() {
  if (::geteuid() == 0 && ::setuid(65534) != 0) return 10;
  rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 11;
  limit.rlim_cur = 300;
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) return 12;
  constexpr int kMessages = 12;
  const std::vector<int> fds(100, STDERR_FILENO);
  std::array<Connection, 2> ends = connected_pair();
  const auto send_until = [&](Deadline deadline) {
    for (int i = 0; i < kMessages; ++i) ends[0].send_descriptors(fds, "d", deadline);
  };
  // The control: without a receiver the limit is reached.
  if (!error_of([&] { send_until(steady_clock::now() + 100ms); }).starts_with("Timeout")) return 13;
  std::array<Connection, 2> fresh = connected_pair();
  std::swap(ends, fresh);
  fresh = {};
  std::thread receiver([&] {
    std::this_thread::sleep_for(200ms);
    std::string count(1, '\0');
    for (int i = 0; i < kMessages; ++i)
      if (ends[1].receive_descriptors(count, soon()).size() != fds.size()) ::_exit(14);
  });
  const std::string error = error_of([&] { send_until(soon()); });
  receiver.join();
  return error.empty() ? 0 : 15;
}

TEST(Descriptors, SenderWaitsWhileTooManyAreOnTheirWay) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(send_beyond_the_limit());
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace tessera::comm_test
