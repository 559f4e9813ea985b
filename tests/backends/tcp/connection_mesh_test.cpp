// How a world connects: addresses, settings, unauthenticated peers, unreachable ranks.
#include "backends/tcp/transport.h"

#include <sys/socket.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <cerrno>
#include <cstring>
#include <future>

#include "backends/tcp/handshake.h"
#include "backends/tcp/mesh_connector.h"
#include "tests/backends/tcp/strangers.h"
#include "tests/backends/tcp/support.h"
#include "tests/backends/tcp/tampered_bootstrap.h"

namespace tessera::tcp_test {
namespace {

TEST(ConnectionMesh, ConnectsWorldsOfManySizes) {
  for (const int ranks : {1, 2, 5, 9}) {
    const World world = make_world(ranks, 3);
    expect_working(world);
    close(world);
  }
}

TEST(ConnectionMesh, SupportsIPv6) {
  const World world = make_world(tampered(3, [](TamperedBootstrap& own) { own.address = "::1"; }));
  sockaddr_storage name = {};
  socklen_t length = sizeof(name);
  const auto& stream = *world[0]->transport->peer(1)->streams().front();
  ::getpeername(const_cast<comm::tcp::Socket&>(stream.socket).native_handle(), reinterpret_cast<sockaddr*>(&name),
                &length);
  EXPECT_EQ(name.ss_family, AF_INET6);
  expect_working(world);
  close(world);
}

/// A peer that claims to be rank 0 without knowing the token: connects in the constructor and continues in its own
/// thread.
class Forger {
 public:
  explicit Forger(std::uint16_t port) : socket_(context_) {
    socket_.connect({boost::asio::ip::make_address("127.0.0.1"), port});
    boost::asio::co_spawn(
        context_,
        [this]() -> boost::asio::awaitable<void> {
          socket_.native_non_blocking(true);
          SecureStream stream(socket_.native_handle());
          comm::tcp::Introduction own{.link = {0, 1, 0}, .keys = {}};
          refusal_ = co_await comm::tcp::introduce(socket_, stream, Bootstrap::Token{7}, own);
        },
        boost::asio::detached);
    thread_ = std::thread([this] { context_.run_for(20s); });
  }
  ~Forger() {
    if (thread_.joinable()) thread_.join();
  }
  /// Waits for the refusal.
  const std::string& refusal() {
    thread_.join();
    return refusal_;
  }

 private:
  boost::asio::io_context context_{1};
  comm::tcp::Socket socket_;
  std::string refusal_ = "unfinished";
  std::thread thread_;
};

TEST(ConnectionMesh, UnauthenticatedPeersDisturbNoRank) {
  std::vector<UniqueFd> strangers;
  std::optional<Forger> forger;
  std::uint16_t port = 0;
  const auto start = Clock::now();
  const World world = make_world(tampered(2, [&](TamperedBootstrap& own) {
    if (own.rank() != 0) return;
    own.on_addresses = [&](std::vector<std::string>& lines) {  // before rank 0 itself connects to rank 1
      port = port_of(lines[1]);
      strangers = intrude(port);
      forger.emplace(port);
    };
  }));
  EXPECT_LT(Clock::now() - start, 8s) << "silent strangers have 10 s, the ranks don't wait for them";
  const std::string refusal = forger->refusal();
  EXPECT_TRUE(refusal == "it did not accept this rank" || refusal == "it did not answer") << refusal;
  expect_working(world);
  close(world);
  EXPECT_FALSE(connect_to_port(port)) << "nobody listens any more";
}

bool is_closed(const UniqueFd& fd) {
  char bytes[256];
  ssize_t n = 0;
  while ((n = ::recv(fd.get(), bytes, sizeof(bytes), MSG_DONTWAIT)) > 0) {
  }
  return n == 0 || errno != EAGAIN;
}

TEST(ConnectionMesh, FloodFromOtherAddressesDropsNoRank) {
  comm::tcp::MeshConnector one(1, 1, Bootstrap::Token{}, nullptr);
  const comm::tcp::Endpoint own = one.listen(boost::asio::ip::make_address("127.0.0.1"));
  auto run = std::async(std::launch::async, [&] {
    return one.run({{boost::asio::ip::make_address("127.0.0.1"), 1}, own}, 6s);
  });
  const UniqueFd rank = connect_to_port(own.port());  // which may be far away
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 1500; ++i) strangers.push_back(connect_to_port(own.port(), INADDR_LOOPBACK + 1));
  const auto closed = [&] { return std::count_if(strangers.begin(), strangers.end(), is_closed); };
  for (int i = 0; i < 200 && closed() <= 1000; ++i) std::this_thread::sleep_for(10ms);
  EXPECT_FALSE(is_closed(rank));
  EXPECT_GT(closed(), 1000) << "the negative control";
  EXPECT_NE(run.get(), "");
}

TEST(ConnectionMesh, NamesRankOfOtherWorld) {
  WorldPlan plan = tampered(3, [](TamperedBootstrap& own) {
    if (own.rank() == 1) own.own_token()[0] ^= 1;
  });
  plan.timeout = 3s;
  World world;
  for (const std::string& error : try_to_make(plan, world)) {
    EXPECT_EQ(error.find("Timeout: rank 0: tcp: not connected within"), 0U) << error;
    EXPECT_NE(error.find("rank 1 at 127.0.0.1:"), std::string::npos) << error;
    EXPECT_EQ(error.find("rank 2 at"), std::string::npos) << error;
  }
}

TEST(ConnectionMesh, NamesUnreachableRankWithReason) {
  WorldPlan plan = tampered(3, [](TamperedBootstrap& own) {
    own.on_addresses = [](std::vector<std::string>& lines) { lines[2] = "+1 127.0.0.1"; };
  });
  plan.timeout = 2s;
  World world;
  for (const std::string& error : try_to_make(plan, world)) {
    EXPECT_NE(error.find("rank 2 at 127.0.0.1:1: Connection refused"), std::string::npos) << error;
    EXPECT_NE(error.find("TESSERA_IFNAME"), std::string::npos) << error;
  }
}

TEST(ConnectionMesh, OpensOneConnectionOverLoopbackAndTwoBetweenHosts) {
  EXPECT_EQ(comm::tcp::streams_for({}, {"a", "a", "a"}), 1);
  EXPECT_EQ(comm::tcp::streams_for({}, {"a", "a", "b"}), 2);
  EXPECT_EQ(comm::tcp::streams_for({.streams = 5}, {"a", "b"}), 5);
}

TEST(ConnectionMesh, InvalidOptionsOfOneRankFailAll) {
  WorldPlan plan;
  plan.ranks = 3;
  plan.change = [](int rank, TcpOptions& settings) {
    if (rank == 2) settings.interfaces = "nonesuch0";
  };
  World world;
  for (const std::string& error : try_to_make(plan, world))
    EXPECT_EQ(error.find("InvalidUsage: rank 2: tcp: TESSERA_IFNAME=nonesuch0: "), 0U) << error;
  plan.change = [](int rank, TcpOptions& settings) { settings.streams = 1 + rank % 2; };
  for (const std::string& error : try_to_make(plan, world))
    EXPECT_EQ(
        error.find(
            "InvalidUsage: init: TESSERA_TCP_STREAMS differs between the ranks: it is 1 on ranks 0, 2; 2 on rank 1"),
        0U)
        << error;
  plan.change = [](int rank, TcpOptions& settings) {
    if (rank == 1) settings.checksum = comm::tcp::Checksum::never;
  };
  for (const std::string& error : try_to_make(plan, world))
    EXPECT_EQ(error.find("InvalidUsage: init: TESSERA_TCP_CHECKSUM differs between the ranks: it is unset on ranks 0, "
                         "2; 0 on rank 1"),
              0U)
        << error;
  plan.change = [](int rank, TcpOptions& settings) { settings.mac = rank != 1; };
  for (const std::string& error : try_to_make(plan, world))
    EXPECT_EQ(
        error.find(
            "InvalidUsage: init: TESSERA_TCP_MAC differs between the ranks: it is off on rank 1; on on ranks 0, 2"),
        0U)
        << error;
}

}  // namespace
}  // namespace tessera::tcp_test
