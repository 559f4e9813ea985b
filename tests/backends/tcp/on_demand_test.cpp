// Ranks that connect when the first message between them is sent.
#include <algorithm>
#include <future>

#include "backends/tcp/transport.h"
#include "tessera/comm/bootstrap/secure_stream.h"
#include "tests/backends/tcp/strangers.h"

namespace tessera::tcp_test {
namespace {

using comm::tcp::Connect;

WorldPlan on_demand(int ranks, int streams = 1) {
  WorldPlan plan;
  plan.ranks = ranks;
  plan.settings.streams = streams;
  plan.settings.connect = Connect::on_demand;
  return plan;
}

WorldPlan on_demand(int ranks, const std::function<void(TamperedBootstrap&)>& tamper) {
  WorldPlan plan = tampered(ranks, tamper);
  plan.settings.connect = Connect::on_demand;
  return plan;
}

/// "0-2 1-2": the pairs of ranks of which both have connections.
std::string connected_pairs(const World& world) {
  std::string pairs;
  for (const auto& a : world)
    for (const auto& b : world) {
      const auto has = [](const auto& one, const auto& other) {
        return one != other && one->transport->peer(other->rank)->connected();
      };
      EXPECT_EQ(has(a, b), has(b, a)) << a->rank << " and " << b->rank;
      if (a->rank < b->rank && has(a, b))
        pairs += (pairs.empty() ? "" : " ") + std::to_string(a->rank) + "-" + std::to_string(b->rank);
    }
  return pairs;
}

TEST(OnDemand, OnlyRanksThatExchangeMessagesConnect) {
  const World world = make_world(on_demand(4, 2));
  EXPECT_EQ(connected_pairs(world), "");
  for (const auto& [from, to] : {std::pair(0, 2), std::pair(3, 1)}) {
    const auto in = world[static_cast<std::size_t>(to)]->receive(from, {1, 1, 0}, 300'000);
    const auto out = world[static_cast<std::size_t>(from)]->send(to, {1, 1, 0}, 300'000);
    ASSERT_TRUE(poll_until(world, [&] { return in->done && out->done; }));
    EXPECT_TRUE(intact(*in, 300'000));
  }
  EXPECT_EQ(connected_pairs(world), "0-2 1-3");
  EXPECT_EQ(world[0]->transport->peer(2)->streams().size(), 2U);
  EXPECT_FALSE(world[1]->transport->arrived(0, {1, 1, 0})) << "nothing arrives from a rank without a connection";
  const World at_start = make_world(4, 1);  // the control
  EXPECT_EQ(connected_pairs(at_start), "0-1 0-2 0-3 1-2 1-3 2-3");
  close(world);
  close(at_start);
}

TEST(OnDemand, ManyConnectionsAreMadeOnDemandUnlessChosen) {
  using comm::tcp::connects_on_demand;
  EXPECT_FALSE(connects_on_demand({}, 49, 1));
  EXPECT_TRUE(connects_on_demand({}, 50, 1));
  EXPECT_FALSE(connects_on_demand({}, 25, 2));
  EXPECT_TRUE(connects_on_demand({}, 26, 2));
  EXPECT_TRUE(connects_on_demand({.connect = Connect::on_demand}, 2, 1));
  EXPECT_FALSE(connects_on_demand({.connect = Connect::at_start}, 1000, 1));
  WorldPlan plan;
  plan.ranks = 2;
  plan.change = [](int rank, TcpOptions& settings) { settings.connect = rank == 0 ? Connect::on_demand : Connect(); };
  World world;
  for (const std::string& error : try_to_make(plan, world))
    EXPECT_EQ(error.find("InvalidUsage: init: TESSERA_TCP_CONNECT differs between the ranks: it is demand on rank 0; "
                         "start on rank 1"),
              0U)
        << error;
}

/// All ranks send to all others at once, so that both of two ranks begin to connect: one set of connections remains,
/// and no message is lost. Small messages may be sent before the other side has taken the connection over.
void exchange_at_once(const World& world, std::size_t bytes) {
  on_threads(world, [&](Node& node) {
    std::vector<std::unique_ptr<TestMessage>> in, out;
    for (int other = 0; other < static_cast<int>(world.size()); ++other) {
      if (other == node.rank) continue;
      const auto tag = [](int from) { return MessageTag{1, static_cast<std::uint32_t>(from), 0}; };
      in.push_back(node.receive(other, tag(other), bytes));
      out.push_back(node.send(other, tag(node.rank), bytes));
    }
    const std::size_t all = in.size() + out.size();
    ASSERT_TRUE(node.until([&] { return node.finished == all; })) << node.reason << node.failure;
    for (const auto& one : in) EXPECT_TRUE(intact(*one, bytes));
  });
  for (const auto& node : world) {
    EXPECT_TRUE(node->lost.empty()) << node->reason;
    EXPECT_EQ(node->failure, "");
  }
}

TEST(OnDemand, BothRanksMayBeginAtOnce) {
  for (int round = 0; round < 30; ++round) {
    const World world = make_world(on_demand(4, 1 + round % 3));
    exchange_at_once(world, round % 2 == 0 ? 100 : 400'000);
    EXPECT_EQ(connected_pairs(world), "0-1 0-2 0-3 1-2 1-3 2-3");
    close(world);
    for (const auto& node : world) EXPECT_TRUE(node->lost.empty()) << node->reason;
  }
}

/// Both have begun before either accepts: the lower one's connection is made, so the other end of its socket listens.
TEST(OnDemand, LowerRankConnectsIfBothBegin) {
  for (int round = 0; round < 20; ++round) {
    comm::tcp::MeshConnector lower(0, 1, Bootstrap::Token{}, nullptr), higher(1, 1, Bootstrap::Token{}, nullptr);
    const auto here = boost::asio::ip::make_address("127.0.0.1");
    const std::vector<comm::tcp::Endpoint> endpoints{lower.listen(here), higher.listen(here)};
    lower.serve(endpoints, 20s);
    higher.serve(endpoints, 20s);
    lower.want(1);
    higher.want(0);
    std::vector<comm::tcp::MeshConnector::Outcome> of_lower, of_higher;
    const auto end = Clock::now() + kPatience;
    while ((of_lower.empty() || of_higher.empty()) && Clock::now() < end) {
      for (auto& one : higher.poll()) of_higher.push_back(std::move(one));  // it is always a step ahead
      for (auto& one : lower.poll()) of_lower.push_back(std::move(one));
    }
    ASSERT_EQ(of_lower.size(), 1U);
    ASSERT_EQ(of_higher.size(), 1U);
    sockaddr_in name = {};
    socklen_t length = sizeof(name);
    ASSERT_EQ(::getpeername(of_lower[0].streams.at(0).fd.get(), reinterpret_cast<sockaddr*>(&name), &length), 0);
    ASSERT_EQ(ntohs(name.sin_port), endpoints[1].port()) << "in round " << round;
  }
}

TEST(OnDemand, ConnectionsAreEncryptedToo) {
  for (int round = 0; round < 5; ++round) {
    WorldPlan plan = on_demand(3, 2);
    plan.tls = std::make_shared<const TlsContext>(TlsContext::Files{});
    const World world = make_world(plan);
    exchange_at_once(world, 50'000);
    EXPECT_TRUE(world[0]->transport->peer(1)->authenticated());
    close(world);
  }
}

/// A rank that computes accepts nothing: this is no failure, however short the timeout is.
TEST(OnDemand, RankThatComputesIsWaitedFor) {
  WorldPlan plan = on_demand(2);
  plan.timeout = 400ms;
  const World world = make_world(plan);
  const auto out = world[0]->send(1, {1, 1, 0}, 1000);
  EXPECT_FALSE(world[0]->until([&] { return out->done; }, 1200ms));
  EXPECT_TRUE(world[0]->lost.empty()) << world[0]->reason;
  const auto in = world[1]->receive(0, {1, 1, 0}, 1000);
  ASSERT_TRUE(poll_until(world, [&] { return in->done && out->done; }));
  EXPECT_TRUE(intact(*in, 1000));
  close(world);
}

TEST(OnDemand, UnreachableRankIsNamedWithReason) {
  WorldPlan plan = on_demand(3, [](TamperedBootstrap& own) {
    own.on_addresses = [](std::vector<std::string>& lines) { lines[2] = "+1 127.0.0.1"; };
  });
  plan.timeout = 800ms;
  const World world = make_world(plan);
  auto out = world[0]->send(2, {1, 1, 0}, 1000);
  const auto begin = Clock::now();
  ASSERT_TRUE(poll_until(world, [&] { return !world[0]->lost.empty(); }));
  EXPECT_GT(Clock::now() - begin, 500ms);
  EXPECT_EQ(world[0]->lost, std::vector<int>{2});
  EXPECT_EQ(world[0]->reason,
            "not connected within 600ms at 127.0.0.1:1: Connection refused (TESSERA_IFNAME chooses the network "
            "interface)");
  EXPECT_TRUE(world[1]->lost.empty()) << "it sent nothing to rank 2";
  world[0]->transport->cancel(out->message);
  const auto in = world[1]->receive(0, {1, 1, 0}, 1000);  // the others go on
  const auto other = world[0]->send(1, {1, 1, 0}, 1000);
  EXPECT_TRUE(poll_until(world, [&] { return in->done && other->done; }));
}

TEST(OnDemand, RankOfOtherWorldIsNotConnected) {
  WorldPlan plan = on_demand(2, [](TamperedBootstrap& own) {
    if (own.rank() == 1) own.own_token()[0] ^= 1;
  });
  plan.timeout = 800ms;
  const World world = make_world(plan);
  auto out = world[0]->send(1, {1, 1, 0}, 1000);
  ASSERT_TRUE(poll_until(world, [&] { return !world[0]->lost.empty(); }));
  EXPECT_NE(world[0]->reason.find("it did not accept this rank"), std::string::npos) << world[0]->reason;
  EXPECT_FALSE(world[1]->transport->peer(0)->connected());
  world[0]->transport->cancel(out->message);
}

TEST(OnDemand, MessagesCanBeCanceledBeforeTheConnectionIsMade) {
  const World world = make_world(on_demand(2));
  auto lost_out = world[0]->send(1, {1, 1, 0}, 1000);
  auto lost_in = world[1]->receive(0, {1, 2, 0}, 400'000);
  world[0]->transport->cancel(lost_out->message);
  world[1]->transport->cancel(lost_in->message);
  lost_out.reset();
  lost_in.reset();
  const auto in = world[1]->receive(0, {1, 3, 0}, 400'000);
  const auto out = world[0]->send(1, {1, 3, 0}, 400'000);
  ASSERT_TRUE(poll_until(world, [&] { return in->done && out->done; }));
  EXPECT_TRUE(intact(*in, 400'000));
  close(world);
}

/// A rank sleeps until a message arrives, from a rank with which it has no connection yet.
TEST(OnDemand, ConnectionWakesSleepingRank) {
  const World world = make_world(on_demand(2));
  std::atomic<bool> sleeps{false};
  auto receiver = std::async(std::launch::async, [&] {
    const auto in = world[1]->receive(0, {1, 1, 0}, 1000);
    std::chrono::nanoseconds longest{};
    while (!in->done) {
      if (world[1]->transport->poll(true) || !world[1]->transport->waiter().arm()) continue;
      sleeps.store(true);
      const auto begin = Clock::now();
      world[1]->transport->waiter().sleep(20s);
      longest = std::max<std::chrono::nanoseconds>(longest, Clock::now() - begin);
    }
    return longest;
  });
  while (!sleeps.load()) std::this_thread::yield();
  std::this_thread::sleep_for(50ms);
  const auto out = world[0]->send(1, {1, 1, 0}, 1000);
  EXPECT_TRUE(world[0]->until([&] { return out->done; }));
  EXPECT_LT(receiver.get(), 10s);
  close(world);
}

TEST(OnDemand, UnauthenticatedPeersDisturbNoRank) {
  std::vector<std::uint16_t> ports(2);
  const World world = make_world(on_demand(2, [&](TamperedBootstrap& own) {
    if (own.rank() != 0) return;
    own.on_addresses = [&](std::vector<std::string>& lines) {
      for (std::size_t r = 0; r < ports.size(); ++r) ports[r] = port_of(lines[r]);
    };
  }));
  const std::vector<UniqueFd> strangers = intrude(ports[1]);
  const auto begin = Clock::now();
  expect_working(world);
  EXPECT_LT(Clock::now() - begin, 8s) << "silent strangers have 10 s, the ranks don't wait for them";
  const UniqueFd late = connect_to_port(ports[1]);  // a connection that is made already goes on, too
  expect_working(world);
  close(world);
  for (const std::uint16_t port : ports) EXPECT_FALSE(connect_to_port(port)) << "somebody still listens";
}

TEST(OnDemand, RankWithoutConnectionsClosesAtOnce) {
  const World world = make_world(on_demand(3));
  const auto out = world[0]->receive(1, {1, 1, 0}, 400'000);  // its request is never sent
  const auto begin = Clock::now();
  world[0]->transport->cancel(out->message);
  close(world);
  EXPECT_LT(Clock::now() - begin, 1900ms) << "close() waits for 2 s at most";
}

}  // namespace
}  // namespace tessera::tcp_test
