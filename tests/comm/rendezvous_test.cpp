// The rendezvous at TESSERA_MASTER, and its errors.
#include "tests/comm/rendezvous.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <new>
#include <set>
#include <thread>

#include "tessera/comm/bootstrap/rendezvous.h"
#include "tessera/comm/bootstrap/rendezvous_server.h"
#include "tessera/comm/registry.h"

namespace tessera::comm_test {
namespace {

class RendezvousAddresses : public testing::TestWithParam<const char*> {};

TEST_P(RendezvousAddresses, ConnectsRanks) {
  const std::vector<Outcome> all = rendezvous_all(3, free_port(), {}, GetParam());
  ASSERT_NO_FATAL_FAILURE(assert_complete(all));
  for (const Outcome& one : all) {
    ASSERT_NE(one.bootstrap, nullptr);
    EXPECT_EQ(one.bootstrap->token(), all[0].bootstrap->token());
    EXPECT_NE(one.bootstrap->token(), Bootstrap::Token{});
    EXPECT_EQ(one.bootstrap->hosts(), std::vector<std::string>(3, all[0].bootstrap->hosts()[0]));
    const std::string address = one.bootstrap->local_address();
    // The hosts file decides whether localhost is ::1, 127.0.0.1 or both.
    const std::string expected =
        GetParam() == std::string("localhost") ? all[0].bootstrap->local_address() : GetParam();
    EXPECT_EQ(address, expected == "[::1]" ? "::1" : expected);
    EXPECT_TRUE(address == "::1" || address == "127.0.0.1") << address;
  }
}
INSTANTIATE_TEST_SUITE_P(Of, RendezvousAddresses, testing::Values("127.0.0.1", "[::1]", "localhost"));

// Rank 0 may close its server as soon as all ranks are there, while events that it waited for are ready already.
TEST(Rendezvous, ClosedServerHandlesNoEvent) {
  boost::asio::io_context context(1);
  std::vector<UniqueFd> listeners;
  listeners.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
  const int listener = listeners.front().get();
  ASSERT_EQ(::listen(listener, 8), 0);  // at a port that the system chooses
  sockaddr_in address{};
  socklen_t length = sizeof(address);
  ASSERT_EQ(::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
  alignas(RendezvousServer) std::array<std::byte, sizeof(RendezvousServer)> memory;
  auto* server = new (memory.data()) RendezvousServer(context, std::move(listeners), {.size = 2, .run = "r"}, "now");
  const UniqueFd stranger = connect_to_port(ntohs(address.sin_port));
  context.run_one_for(std::chrono::seconds(5));  // it is accepted: from now on, the pending peers are swept
  const UniqueFd second = connect_to_port(ntohs(address.sin_port));
  std::this_thread::sleep_for(std::chrono::milliseconds(700));  // a sweep is due, and the second peer is there
  context.run_one_for(std::chrono::seconds(5));  // one is handled, the other is ready and waits for its turn
  server->~RendezvousServer();
  std::memset(memory.data(), 0, memory.size());  // a handler that uses the server would end the process
  std::size_t handled = 0;
  while (context.poll_one() > 0) ++handled;
  EXPECT_GE(handled, 1U);  // else this tests nothing
}

TEST(Rendezvous, RanksOfOneHostShareToken) {
  std::array<Bootstrap::Token, 2> tokens{};
  std::vector<std::thread> ranks;
  for (int r = 0; r < 2; ++r)
    ranks.emplace_back([&, r] {
      Launch launch{.launcher = "test",
                    .rank = r,
                    .size = 2,
                    .local_rank = r,
                    .local_size = 2,
                    .job = "token-" + std::to_string(::getpid())};
      const auto bootstrap =
          rendezvous({.launch = launch, .timeout = std::chrono::seconds(20), .master = {}, .token = {}, .host_id = {}});
      tokens[static_cast<std::size_t>(r)] = bootstrap->token();
      bootstrap->all_gather("all have met");
    });
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(tokens[0], tokens[1]);
  EXPECT_NE(tokens[0], Bootstrap::Token{});
}

TEST(Rendezvous, AcceptsOwnHostName) {
  std::array<char, 256> name{};
  ASSERT_EQ(::gethostname(name.data(), name.size() - 1), 0);
  assert_complete(rendezvous_all(2, free_port(), {}, name.data()));
}

TEST(Rendezvous, ExchangesKeepData) {
  const std::vector<Outcome> all = rendezvous_all(3, free_port());
  ASSERT_NO_FATAL_FAILURE(assert_complete(all));
  std::vector<std::future<std::vector<std::string>>> given;
  for (const Outcome& one : all)
    given.push_back(std::async(std::launch::async, [&one] {
      return one.bootstrap->all_gather(std::string(100'000, static_cast<char>('a' + one.bootstrap->rank())));
    }));
  for (auto& got : given) {
    const std::vector<std::string> blobs = got.get();
    for (std::size_t r = 0; r < 3; ++r) EXPECT_EQ(blobs[r], std::string(100'000, static_cast<char>('a' + r)));
  }
}

TEST(Rendezvous, EachStartHasItsOwnToken) {
  std::set<Bootstrap::Token> tokens;
  for (int i = 0; i < 2; ++i) tokens.insert(rendezvous_all(2, free_port())[0].bootstrap->token());
  EXPECT_EQ(tokens.size(), 2u);
}

TEST(Rendezvous, DistinguishesHosts) {
  const auto name_hosts = [](RendezvousOptions& one) { one.host_id = one.launch.rank == 2 ? "island" : "main land"; };
  const std::vector<Outcome> all = rendezvous_all(3, free_port(), name_hosts);
  ASSERT_NO_FATAL_FAILURE(assert_complete(all));
  for (const Outcome& one : all) {
    EXPECT_EQ(one.bootstrap->hosts(), (std::vector<std::string>{"main land", "main land", "island"}));
    EXPECT_EQ(error_of([&] { one.bootstrap->all_gather_fds({}, nullptr); }),
              "InvalidUsage: passing descriptors needs all ranks on one host: rank 2 is on host island, rank 0 on main "
              "land");
    EXPECT_EQ(one.bootstrap->local_address(), "127.0.0.1");
  }
}

/// An address of this machine that other hosts may reach; "" if there is none.
std::string outer_address() {
  ifaddrs* all = nullptr;
  std::string found;
  if (::getifaddrs(&all) != 0) return found;
  for (const ifaddrs* one = all; one != nullptr && found.empty(); one = one->ifa_next) {
    std::array<char, INET_ADDRSTRLEN> text{};
    if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != AF_INET || (one->ifa_flags & IFF_LOOPBACK) != 0)
      continue;
    const auto* address = reinterpret_cast<const sockaddr_in*>(one->ifa_addr);
    if (::inet_ntop(AF_INET, &address->sin_addr, text.data(), text.size()) != nullptr) found = text.data();
  }
  ::freeifaddrs(all);
  return found;
}

/// Rank 1 shares rank 0's host and finds it by a loopback address, which rank 2 can't use.
TEST(Rendezvous, ReplacesLoopbackAddressForOtherHosts) {
  const std::string outer = outer_address();
  ASSERT_FALSE(outer.empty())
      << "needs an IPv4 address that is not loopback's: give this machine one, for example of an "
         "interface of type dummy";
  const int port = free_port();
  const auto place = [&](RendezvousOptions& one) {
    one.master = (one.launch.rank == 0   ? "anywhere.invalid"
                  : one.launch.rank == 1 ? "127.0.0.1"
                                         : outer) +
                 ":" + std::to_string(port);
    one.host_id = one.launch.rank == 2 ? "island" : "main land";
  };
  const std::vector<Outcome> all = rendezvous_all(3, port, place);
  ASSERT_NO_FATAL_FAILURE(assert_complete(all));
  for (const Outcome& one : all) EXPECT_EQ(one.bootstrap->local_address(), outer);
  // Control: if all ranks are on one host, they use loopback.
  const int other = free_port();
  for (const Outcome& one : rendezvous_all(3, other, [&](RendezvousOptions& each) {
         place(each);
         each.master.replace(each.master.rfind(':') + 1, std::string::npos, std::to_string(other));
         each.host_id = "main land";
       }))
    EXPECT_EQ(one.bootstrap->local_address(), "127.0.0.1");
}

TEST(Rendezvous, SingleHostBackendRejectsSeveralHosts) {
  const std::vector<Outcome> all = rendezvous_all(
      2, free_port(), [](RendezvousOptions& one) { one.host_id = "host" + std::to_string(one.launch.rank); });
  ASSERT_NO_FATAL_FAILURE(assert_complete(all));
  for (const Outcome& one : all)
    EXPECT_EQ(
        error_of([&] { find_backend("shm").create(one.bootstrap, BackendOptions{}); }),
        "InvalidUsage: shm needs all ranks on one host: rank 1 is on host host1, rank 0 on host0; use backend auto");
}

TEST(Rendezvous, NamesRankThatStopsResponding) {
  const auto soon = [](RendezvousOptions& one) { one.timeout = 600ms; };
  const std::vector<Outcome> all = rendezvous_all(3, free_port(), soon);
  ASSERT_NO_FATAL_FAILURE(assert_complete(all));
  auto one = std::async(std::launch::async, [&] { return error_of([&] { all[1].bootstrap->all_gather("x"); }); });
  const std::string expected = "Timeout: init: rank 2 of 3 connected, but did not answer within 600ms";
  EXPECT_EQ(error_of([&] { all[0].bootstrap->all_gather("x"); }), expected);
  // Rank 1's own deadline passes at the same time, so either error may come first.
  EXPECT_TRUE(one.get().starts_with("Timeout: init: "));
}

TEST(Rendezvous, RunsWholeWorld) {
  const int port = free_port();
  std::vector<std::future<float>> sums;
  for (int r = 0; r < 2; ++r)
    sums.push_back(std::async(std::launch::async, [r, port] {
      InitOptions config = quick_config();
      const std::shared_ptr<Bootstrap> bootstrap = rendezvous(options_of(r, 2, port));
      BackendOptions options;
      options.communicator.timeout = 20s;
      const auto world = find_backend("shm").create(bootstrap, options);
      float x = static_cast<float>(r + 1);
      world->all_reduce(view_of(&x, 1), view_of(&x, 1), ReduceOp::sum()).wait();
      return x;
    }));
  for (auto& sum : sums) EXPECT_EQ(sum.get(), 3.0f);
}

TEST(Rendezvous, ReportsNoRankAsDeadOnBusyMachine) {
  constexpr int kWorlds = 40;
  constexpr int kRanks = 4;
  std::atomic<int> lost{0};
  std::atomic<int> opened{0};
  std::vector<std::thread> ranks;
  for (int i = 0; i < kWorlds * kRanks; ++i)
    ranks.emplace_back([&, i] {
      const std::string job = "busy-" + std::to_string(::getpid()) + "-" + std::to_string(i / kRanks);
      const Launch launch{.launcher = "test", .rank = i % kRanks, .size = kRanks, .local_size = kRanks, .job = job};
      const auto bootstrap = rendezvous({.launch = launch, .timeout = 20s, .master = {}, .token = {}, .host_id = {}});
      const auto channel = bootstrap->open_channel("test", {.lost = [&](int) { ++lost; }, .message = {}});
      ++opened;
      std::this_thread::sleep_for(1s);  // longer than the grace period for the farewell of a process that ends
    });
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(opened.load(), kWorlds * kRanks);
  EXPECT_EQ(lost.load(), 0);
}

TEST(RendezvousTimeout, ConnectedRanksNameMissingOnes) {
  const int port = free_port();
  RendezvousOptions first = options_of(0, 4, port);
  first.timeout = 700ms;
  auto zero = come(first);
  auto two = come(options_of(2, 4, port));
  const std::string expected =
      "Timeout: init: of 4 ranks, rank 1, 3 did not connect at TESSERA_MASTER=127.0.0.1:" + std::to_string(port) +
      " within 700ms (launcher tessera, run 'run-1')";
  EXPECT_EQ(zero.get().error, expected);
  EXPECT_EQ(two.get().error, expected);
  RendezvousOptions alone = options_of(1, 2, port);
  alone.timeout = 300ms;
  EXPECT_EQ(come(alone).get().error,
            "Timeout: init: rank 1 of 2 found no rank 0 within 300ms (launcher tessera, run 'run-1'): "
            "TESSERA_MASTER=127.0.0.1:" +
                std::to_string(port) + ": Connection refused");
}

TEST(RendezvousTimeout, RanksThatConnectBeforeRank0NameMissingOnes) {
  const int port = free_port();
  const auto impatient = [&](int rank, std::chrono::milliseconds timeout) {
    RendezvousOptions one = options_of(rank, 3, port);
    one.timeout = timeout;
    return one;
  };
  auto two = come(impatient(2, 700ms));
  const std::string error = come(impatient(0, 1000ms)).get().error;
  EXPECT_NE(error.find("of 3 ranks, rank 1 did not connect"), std::string::npos) << error;
  EXPECT_EQ(two.get().error, error);
}

TEST(RendezvousTimeout, RankThatDiedMayReconnect) {
  const int port = free_port();
  auto zero = come(options_of(0, 3, port));
  RendezvousOptions brief = options_of(1, 3, port);
  brief.timeout = 300ms;  // its timeout passes while rank 2 is still missing
  EXPECT_NE(come(brief).get().error, "");
  auto one = come(options_of(1, 3, port));
  auto two = come(options_of(2, 3, port));
  EXPECT_EQ(one.get().error, "");
  EXPECT_EQ(two.get().error, "");
  EXPECT_EQ(zero.get().error, "");
}

TEST(RendezvousOptions, NamePortInUse) {
  const UniqueFd taken = listen_on_port(0);
  const std::string port = std::to_string(port_of(taken));
  for (const std::string host : {"127.0.0.1", "localhost"})
    EXPECT_EQ(come(options_of(0, 2, port_of(taken), host)).get().error,
              "InvalidUsage: init: TESSERA_MASTER=" + host + ":" + port + ": port " + port +
                  " is in use on the host of rank 0; choose another port, or end the run that uses it");
}

TEST(RendezvousOptions, NameForeignAddress) {
  EXPECT_NE(come(options_of(0, 2, 29400, "203.0.113.7")).get().error.find("not an address of the host of rank 0"),
            std::string::npos);
}

TEST(RendezvousOptions, MasterNeedsToken) {
  RendezvousOptions one = options_of(0, 2, free_port());
  one.token.clear();
  EXPECT_TRUE(come(one).get().error.starts_with("InvalidUsage: init: TESSERA_MASTER=127.0.0.1:"));
  EXPECT_NE(come(one).get().error.find("needs TESSERA_TOKEN"), std::string::npos);
}

/// The time to derive the key is that of each guess by one who has recorded a hello.
TEST(RendezvousOptions, TokenThatCanBeGuessedIsStretched) {
  const auto shortest = [](const std::string& token) {
    RendezvousOptions one = options_of(1, 2, free_port());
    one.token = token;
    one.timeout = 1ms;
    auto least = steady_clock::duration::max();
    for (int i = 0; i < 5; ++i) {
      const auto start = steady_clock::now();
      come(one).get();
      least = std::min(least, steady_clock::now() - start);
    }
    return least;
  };
  const auto random = shortest("0f9d3c7a51e28b64908cfe1265bd7a43");
  EXPECT_GT(shortest("swordfish"), 3 * random);
  EXPECT_GT(shortest(std::string(40, 'a') + "b"), 3 * random);
}

TEST(RendezvousOptions, SeveralHostsNeedMaster) {
  RendezvousOptions one = options_of(0, 4, 1);
  one.master.clear();
  one.launch.local_size = 2;
  const std::string error = come(one).get().error;
  EXPECT_TRUE(error.starts_with("InvalidUsage: init: the tessera launcher says that 2 of 4 ranks are on this host"));
  EXPECT_NE(error.find("set TESSERA_MASTER=host:port"), std::string::npos) << error;
  EXPECT_NE(error.find("TESSERA_TOKEN"), std::string::npos) << error;
}

TEST(RendezvousOptions, MasterIsHostAndPort) {
  for (const std::string wrong : {"node7", "node7:", ":29400", "node7:0", "node7:70000", "node7:x", "::1:29400",
                                  "[::1]", "[]:29400", "http://node7:29400", "a b:1"}) {
    RendezvousOptions one = options_of(1, 2, 1);
    one.master = wrong;
    const std::string error = come(one).get().error;
    EXPECT_TRUE(error.starts_with("InvalidUsage: TESSERA_MASTER")) << wrong << ": " << error;
  }
}

TEST(RendezvousOptions, ParentProcessIsNoNameAcrossHosts) {
  const std::vector<Outcome> all = rendezvous_all(2, free_port(), [](RendezvousOptions& one) {
    one.launch.job = "parent-" + std::to_string(one.launch.rank);
    one.launch.job_is_local = true;
  });
  ASSERT_NO_FATAL_FAILURE(assert_complete(all));
}

}  // namespace
}  // namespace tessera::comm_test
