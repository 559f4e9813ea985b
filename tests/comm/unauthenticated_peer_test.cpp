// Peers that are refused at TESSERA_MASTER: plain sockets, and ranks of other runs. None of them disturbs the run.
#include <sys/resource.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <filesystem>
#include <thread>

#include "tests/comm/handshake_bytes.h"
#include "tests/comm/process.h"
#include "tests/comm/rendezvous.h"

namespace tessera::comm_test {
namespace {

/// Rank 0 waits, `disturb` interferes, and then rank 1 starts: the world must form, and soon.
void expect_undisturbed(const std::function<void(int port)>& disturb) {
  const int port = free_port();
  auto zero = come(options_of(0, 2, port));
  { connect_when_open(port); }
  disturb(port);
  const auto start = steady_clock::now();
  auto one = come(options_of(1, 2, port));
  EXPECT_EQ(one.get().error, "");
  EXPECT_EQ(zero.get().error, "");
  EXPECT_LT(steady_clock::now() - start, 4s);
}

TEST(UnauthenticatedPeer, GarbageDisturbsNoRank) {
  expect_undisturbed([](int port) {
    std::vector<UniqueFd> open;
    for (const std::string& bytes :
         {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(100'000, 'x'), std::string(64, '\0'),
          std::string("h\xff\xff\xff\x7f") + std::string(5000, 'y'),  // a hello of 2 GiB
          std::string("h\x00\x04\x00\x00", 5) + std::string(2000, 'z'), std::string("h")}) {
      open.push_back(connect_to_port(port));
      send_bytes(open.back(), bytes);
    }
    for (std::size_t i = 0; i + 1 < open.size(); ++i) EXPECT_TRUE(closed_within(open[i], 2s)) << i;
    EXPECT_FALSE(closed_within(open.back(), 300ms)) << "half a hello may still become a whole one";
    EXPECT_TRUE(closed_within(open.back(), 7s)) << "but not for ever";
  });
}

/// The number of files that this process can open, less those that the ranks need.
std::size_t open_files_at_most() {
  rlimit limit = {};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  return static_cast<std::size_t>(std::min<rlim_t>(limit.rlim_cur, 20'000)) - 700;
}

TEST(UnauthenticatedPeer, TenThousandHalfOpenConnectionsDisturbNoRank) {
  const std::size_t room = open_files_at_most();
  std::deque<UniqueFd> open;
  std::atomic<bool> done{false};
  std::future<void> flood;
  expect_undisturbed([&](int port) {
    for (int i = 0; i < 10'000; ++i) {
      if (open.size() >= room) open.pop_front();
      open.push_back(connect_to_port(port));
      ASSERT_TRUE(open.back()) << "connection " << i << ": " << std::strerror(errno);
      if (i % 2 == 0) send_bytes(open.back(), "h");
    }
    flood = std::async(std::launch::async, [&, port] {  // continues while the authentic rank connects
      while (!done.load()) {
        open.pop_front();
        open.push_back(connect_to_port(port));
        std::this_thread::sleep_for(100us);
      }
    });
  });
  done.store(true);
  flood.get();
}

/// Connects, half of the time with the beginning of a hello, and keeps as many connections open as possible.
class Flood {
 public:
  Flood(int port, int connections) {
    const std::size_t room = open_files_at_most();
    for (int i = 0; i < connections; ++i) {
      if (open_.size() >= room) open_.pop_front();
      open_.push_back(connect_to_port(port));
      EXPECT_TRUE(open_.back()) << "connection " << i << ": " << std::strerror(errno);
      if (i % 2 == 0) send_bytes(open_.back(), "h");
    }
  }

 private:
  std::deque<UniqueFd> open_;
};

/// Connects to `port` from 127.0.0.2.
UniqueFd connect_from_elsewhere(int port) {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in own = loopback(0);
  own.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1);
  const sockaddr_in address = loopback(port);
  EXPECT_EQ(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&own), sizeof(own)), 0);
  EXPECT_EQ(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  return fd;
}

/// How many of the connections the server has closed.
std::ptrdiff_t closed(const std::vector<UniqueFd>& all) {
  char bytes[2 * kChallengeBytes];
  return std::count_if(all.begin(), all.end(), [&](const UniqueFd& one) {
    ssize_t n = 0;
    while ((n = ::recv(one.get(), bytes, sizeof(bytes), MSG_DONTWAIT)) > 0) {
    }
    return n == 0 || errno != EAGAIN;
  });
}

TEST(UnauthenticatedPeer, OneSourceDoesNotTakeAllPlaces) {
  const int port = free_port();
  auto zero = come(options_of(0, 2, port));
  { connect_when_open(port); }
  constexpr int kPeers = 50;
  std::vector<UniqueFd> of_flood, of_others;
  for (int i = 0; i < kPeers; ++i) {
    of_flood.push_back(connect_to_port(port));
    of_others.push_back(connect_from_elsewhere(port));
  }
  const Flood flood(port, 10'000);
  EXPECT_EQ(closed(of_others), 0);
  EXPECT_GT(closed(of_flood), kPeers / 2) << "the negative control: the flood was too small to fill the places";
  EXPECT_EQ(come(options_of(1, 2, port)).get().error, "");
  EXPECT_EQ(zero.get().error, "");
}

/// A rank far away: rank 0's challenge reaches it only after the flood.
TEST(UnauthenticatedPeer, FloodDropsNoRankThatHasProvenTheToken) {
  const int port = free_port();
  auto zero = come(options_of(0, 2, port));
  { connect_when_open(port); }
  const UniqueFd way = listen_on_port(0);
  auto one = come(options_of(1, 2, port_of(way)));
  const UniqueFd rank(::accept(way.get(), nullptr, nullptr));
  const UniqueFd server = connect_to_port(port);
  std::vector<UniqueFd> strangers;  // the negative control
  for (int i = 0; i < 20; ++i) strangers.push_back(connect_to_port(port));
  send_bytes(server, read_all(rank, 5s, kHelloBytes));
  const Flood flood(port, 10'000);
  const auto until = steady_clock::now() + 2s;
  while (closed(strangers) <= 10 && steady_clock::now() < until) std::this_thread::sleep_for(1ms);
  EXPECT_GT(closed(strangers), 10) << "each is dropped by chance, one in fifty is not";
  send_bytes(rank, read_all(server, 5s, kChallengeBytes));
  send_bytes(server, read_all(rank, 5s, kHelloBytes));
  std::atomic<bool> done{false};
  std::thread forward([&] {
    while (!done.load()) {
      pollfd ends[] = {{rank.get(), POLLIN, 0}, {server.get(), POLLIN, 0}};
      if (::poll(ends, 2, 10) <= 0) continue;
      if (ends[0].revents != 0) send_bytes(server, read_all(rank, 10ms, 1));
      if (ends[1].revents != 0) send_bytes(rank, read_all(server, 10ms, 1));
    }
  });
  EXPECT_EQ(one.get().error, "");
  EXPECT_EQ(zero.get().error, "");
  done.store(true);
  forward.join();
  pollfd again{way.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&again, 1, 0), 0) << "rank 1 has connected a second time";
}

/// How many of 200 strangers receive a challenge within a second.
std::ptrdiff_t looked_at(int port) {
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 200; ++i) strangers.push_back(connect_to_port(port));
  std::this_thread::sleep_for(1s);
  char byte = 0;
  return std::count_if(strangers.begin(), strangers.end(),
                       [&](const UniqueFd& one) { return ::recv(one.get(), &byte, 1, MSG_DONTWAIT) == 1; });
}

TEST(UnauthenticatedPeer, CompleteWorldLooksAtFewPeers) {
  const int port = free_port();
  auto zero = come(options_of(0, 2, port));
  { connect_when_open(port); }
  EXPECT_EQ(looked_at(port), 200) << "the negative control: all, as long as a rank is missing";
  auto one = come(options_of(1, 2, port));
  const std::vector<Outcome> all = {zero.get(), one.get()};
  ASSERT_NO_FATAL_FAILURE(assert_complete(all));
  std::vector<std::future<std::unique_ptr<ControlChannel>>> channels;
  for (const Outcome& rank : all)
    channels.push_back(
        std::async(std::launch::async, [&rank] { return rank.bootstrap->open_channel("test", ControlEvents{}); }));
  for (auto& channel : channels) channel.wait();
  const std::ptrdiff_t late = looked_at(port);
  EXPECT_GE(late, 1);
  EXPECT_LE(late, 20);
}

/// Under a low limit of open files, as `ulimit -n 64` sets it.
TEST(UnauthenticatedPeer, DoesNotExhaustFileDescriptors) {
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const int port = free_port();
  const std::string master = "TESSERA_MASTER=127.0.0.1:" + std::to_string(port);
  const auto start = [&](int rank) {
    return Process(TESSERA_CONTROL_PROGRAM,
                   {"TESSERA_RANK=" + std::to_string(rank), "TESSERA_WORLD_SIZE=2", "TESSERA_RUN_ID=few-files", master,
                    "TESSERA_TOKEN=swordfish", "TESSERA_TIMEOUT=20s"},
                   "");
  };
  const rlimit few{64, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  Process zero = start(0);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  connect_when_open(port);
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 200; ++i) strangers.push_back(connect_to_port(port));
  // All connections were accepted, or closed again: the last one receives its challenge.
  EXPECT_FALSE(read_all(strangers.back(), 10s, 1).empty());
  const std::filesystem::directory_iterator files("/proc/" + std::to_string(zero.pid()) + "/fd");
  EXPECT_LT(std::distance(begin(files), end(files)), 64 - 16) << "strangers have what rank 0 needs";
  Process one = start(1);
  EXPECT_EQ(one.line(), "ready");
  EXPECT_EQ(zero.line(), "ready");
}

TEST(UnauthenticatedPeer, OtherTokenIsRejectedWithReason) {
  expect_undisturbed([](int port) {
    RendezvousOptions wrong = options_of(1, 2, port);
    wrong.token = "sardine";
    wrong.timeout = 1s;
    EXPECT_EQ(come(wrong).get().error,
              "Timeout: init: rank 1 of 2 found no rank 0 within 1s (launcher tessera, run 'run-1'): "
              "TESSERA_MASTER=127.0.0.1:" +
                  std::to_string(port) + ": authentication failed; use the same TESSERA_TOKEN on all ranks");
  });
}

/// The text of an authenticated rank reaches the terminal, too.
TEST(RejectedPeer, ErrorHasNoControlCharacters) {
  expect_undisturbed([](int port) {
    RendezvousOptions stale = options_of(1, 2, port);
    stale.launch.job = "run\x1b[2J\xc2\x9b\xff d\xc3\xa9j\xc3\xa0";
    const std::string error = come(stale).get().error;
    EXPECT_NE(error.find("belongs to run 'run\\x1b[2J\\xc2\\x9b\\xff d\xc3\xa9j\xc3\xa0', rank 0 to run 'run-1'"),
              std::string::npos)
        << error;
  });
}

TEST(RejectedPeer, RankOutsideWorld) {
  const int port = free_port();
  auto zero = come(options_of(0, 2, port));
  for (const int rank : {2, 3, 1'000'000}) {
    const std::string error = come(options_of(rank, 2, port)).get().error;
    EXPECT_NE(error.find("rank " + std::to_string(rank) + " is outside the ranks 0 to 1"), std::string::npos) << error;
  }
  EXPECT_EQ(come(options_of(1, 2, port)).get().error, "");
  EXPECT_EQ(zero.get().error, "");
}

TEST(RejectedPeer, SecondProcessOfRank) {
  const int port = free_port();
  auto zero = come(options_of(0, 3, port));
  auto one = come(options_of(1, 3, port));
  auto other = come(options_of(1, 3, port));
  while (other.wait_for(1ms) == std::future_status::timeout)  // the first of the two becomes rank 1
    if (one.wait_for(1ms) != std::future_status::timeout) std::swap(one, other);
  const std::string error = other.get().error;
  EXPECT_TRUE(error.starts_with("InvalidUsage")) << error;
  EXPECT_NE(error.find("two processes are rank 1 in run 'run-1'"), std::string::npos) << error;
  EXPECT_EQ(come(options_of(2, 3, port)).get().error, "");
  EXPECT_EQ(zero.get().error, "");
  EXPECT_EQ(one.get().error, "");
}

TEST(RejectedPeer, RankOfEarlierStart) {
  expect_undisturbed([](int port) {
    RendezvousOptions stale = options_of(1, 2, port);
    stale.launch.job = "run-0";
    EXPECT_NE(come(stale).get().error.find("rank 1 belongs to run 'run-0', rank 0 to run 'run-1'"), std::string::npos);
  });
}

TEST(RejectedPeer, EarlierRestartWhileLaterOneWaits) {
  const int port = free_port();
  const auto restarted = [&](int rank, std::uint64_t restart) {
    RendezvousOptions one = options_of(rank, 2, port);
    one.launch.restart = restart;
    return one;
  };
  RendezvousOptions old = restarted(0, 1);
  old.timeout = 1500ms;
  auto old_zero = come(old);
  { connect_when_open(port); }
  EXPECT_NE(come(restarted(1, 0)).get().error.find("rank 1 belongs to run 'run-1', rank 0 to run 'run-1', restart 1"),
            std::string::npos);
  auto one = come(restarted(1, 2));  // starts while the old rank 0 still holds the port
  const std::string error = old_zero.get().error;
  EXPECT_NE(error.find("rank 1 did not connect"), std::string::npos) << error;
  EXPECT_NE(error.find("; refused: rank 1 belongs to run 'run-1', rank 0 to"), std::string::npos) << error;
  EXPECT_NE(error.find("rank 1 belongs to run 'run-1', restart 2"), std::string::npos) << error;
  auto zero = come(restarted(0, 2));
  EXPECT_EQ(one.get().error, "");
  EXPECT_EQ(zero.get().error, "");
}

TEST(RejectedPeer, NextWorldIsNotRejected) {
  const int port = free_port();
  const auto of_world = [&](int rank, std::uint32_t generation) {
    RendezvousOptions one = options_of(rank, 2, port);
    one.launch.generation = generation;
    return one;
  };
  auto zero = come(of_world(0, 0));
  auto one = come(of_world(1, 0));
  Outcome first = zero.get();
  EXPECT_EQ(first.error, "");
  EXPECT_EQ(one.get().error, "");  // and it leaves
  auto next = come(of_world(1, 1));
  EXPECT_EQ(next.wait_for(500ms), std::future_status::timeout) << next.get().error;
  first.bootstrap.reset();  // rank 0 leaves too
  auto zero_again = come(of_world(0, 1));
  EXPECT_EQ(next.get().error, "");
  EXPECT_EQ(zero_again.get().error, "");
}

TEST(RejectedPeer, LateRank) {
  const int port = free_port();
  const std::vector<Outcome> all = rendezvous_all(2, port);
  ASSERT_NO_FATAL_FAILURE(assert_complete(all));
  std::vector<std::future<std::unique_ptr<ControlChannel>>> channels;
  for (const Outcome& one : all)
    channels.push_back(
        std::async(std::launch::async, [&one] { return one.bootstrap->open_channel("test", ControlEvents{}); }));
  for (auto& channel : channels) channel.wait();
  const auto start = steady_clock::now();
  EXPECT_NE(
      come(options_of(1, 2, port)).get().error.find("the world of 2 ranks is already complete; rank 1 can't join"),
      std::string::npos);
  EXPECT_LT(steady_clock::now() - start, 1s);
}

TEST(RejectedPeer, OtherWorldSizeIsReportedOnBothRanks) {
  const int port = free_port();
  auto zero = come(options_of(0, 2, port));
  auto one = come(options_of(1, 3, port));
  EXPECT_EQ(zero.get().error, "InvalidUsage: init: rank 1 was started as one of 3 ranks, rank 0 as one of 2");
  EXPECT_NE(one.get().error.find("rank 1 was started as one of 3 ranks, rank 0 as one of 2"), std::string::npos);
}

}  // namespace
}  // namespace tessera::comm_test
