// Connections that end, orderly or not; and how threads sleep.
#include <sys/socket.h>

#include <atomic>
#include <future>
#include <utility>

#include "backends/tcp/frame.h"
#include "tests/backends/tcp/support.h"

namespace tessera::tcp_test {
namespace {

using comm::tcp::kEagerLimit;

int descriptor(Node& node, int peer, std::size_t stream) {
  return node.transport->peer(peer)->streams()[stream]->socket.native_handle();
}

TEST(Failure, ClosedConnectionLosesItsPeerOnce) {
  for (const std::size_t stream : {std::size_t{0}, std::size_t{1}}) {
    const World world = make_world(3, 2);
    auto in = world[1]->receive(0, {1, 1, 0}, 16 << 20);
    std::atomic<std::uint64_t> sent{0};
    auto out = world[0]->test_message(1, {1, 1, 0}, 16 << 20);
    out->message.sent = &sent;
    world[0]->transport->send(out->message);
    ASSERT_TRUE(poll_until(world, [&] { return sent.load() > 1 << 20; }));
    ::shutdown(descriptor(*world[0], 1, stream), SHUT_RDWR);
    ASSERT_TRUE(poll_until(world, [&] { return !world[0]->lost.empty() && !world[1]->lost.empty(); }));
    poll_until_quiet(world);
    EXPECT_EQ(world[0]->lost, std::vector<int>{1});
    EXPECT_EQ(world[1]->lost, std::vector<int>{0});
    EXPECT_TRUE(world[2]->lost.empty());
    EXPECT_FALSE(world[1]->reason.empty());
    world[1]->transport->cancel(in->message);
    world[0]->transport->cancel(out->message);
    in.reset();
    out.reset();
    auto late = world[0]->send(1, {1, 2, 0}, 10);  // to a lost peer: it stays pending
    const auto other_in = world[2]->receive(0, {1, 1, 0}, 300'000);
    const auto other_out = world[0]->send(2, {1, 1, 0}, 300'000);
    ASSERT_TRUE(poll_until(world, [&] { return other_in->done && other_out->done; }));
    EXPECT_TRUE(intact(*other_in, 300'000));
    EXPECT_FALSE(late->done);
    world[0]->transport->cancel(late->message);
    for (const auto& node : world) node->transport->close(true);
  }
}

TEST(Failure, InvalidFrameIsError) {
  const World world = make_world(2, 2);
  const std::string garbage(100, '!');
  ASSERT_EQ(::send(descriptor(*world[0], 1, 1), garbage.data(), garbage.size(), 0), 100);
  ASSERT_TRUE(poll_until(world, [&] { return !world[1]->damage.empty() && !world[0]->lost.empty(); }));
  EXPECT_EQ(world[1]->damage, "from 0: bytes that are not a frame of this version");
  EXPECT_TRUE(world[1]->lost.empty());
}

TEST(Failure, AbruptExitIsLoss) {
  const World world = make_world(2, 2);
  world[0]->transport->close(true);
  ASSERT_TRUE(world[1]->until([&] { return !world[1]->lost.empty(); }));
  EXPECT_TRUE(world[0]->lost.empty()) << "its own doing";
}

TEST(Failure, GracefulCloseIsNoLossAndMessagesArrive) {
  const World world = make_world(2, 2);
  std::promise<void> sent;
  on_threads(world, [&sent](Node& node) {
    std::vector<std::unique_ptr<TestMessage>> test_messages;
    if (node.rank == 0) {
      for (std::uint32_t i = 0; i < 10; ++i) test_messages.push_back(node.send(1, {1, i, 0}, kEagerLimit));
      sent.set_value();
      node.transport->close(false);
      for (const auto& test_message : test_messages) EXPECT_TRUE(test_message->done);
      EXPECT_TRUE(node.lost.empty());
      return;
    }
    EXPECT_EQ(sent.get_future().wait_for(20s), std::future_status::ready);
    for (std::uint32_t i = 0; i < 10; ++i) test_messages.push_back(node.receive(0, {1, i, 0}, kEagerLimit));
    EXPECT_TRUE(node.until([&] { return node.finished == 10; }));
    for (const auto& test_message : test_messages) EXPECT_TRUE(intact(*test_message, kEagerLimit));
    for (int i = 0; i < 100; ++i) node.transport->poll(true);
    EXPECT_TRUE(node.lost.empty()) << node.reason;
    node.transport->close(false);
  });
}

TEST(Failure, EarlyCloseDoesNotWaitAndLosesNothing) {
  const World world = make_world(3, 2);
  std::vector<std::unique_ptr<TestMessage>> in, out;
  for (std::uint32_t i = 0; i < 4; ++i) out.push_back(world[0]->send(1, {1, i, 0}, 10'000));
  const auto unread = world[1]->send(0, {1, 99, 0}, 10'000);  // resets the connection when rank 0 closes it
  const auto start = Clock::now();
  world[0]->transport->close(false);  // the other ranks stay, and do nothing meanwhile
  EXPECT_LT(Clock::now() - start, 1s);
  const auto into_the_void = world[1]->send(0, {1, 100, 0}, 10'000);
  for (std::uint32_t i = 0; i < 4; ++i) in.push_back(world[1]->receive(0, {1, i, 0}, 10'000));
  EXPECT_TRUE(world[1]->until([&] { return in.back()->done; }, 5s)) << world[1]->reason;
  for (const auto& test_message : in) EXPECT_TRUE(test_message->done && intact(*test_message, 10'000));
  for (int i = 0; i < 100; ++i)
    for (const std::size_t r : {1U, 2U}) world[r]->transport->poll(true);
  EXPECT_TRUE(world[1]->lost.empty() && world[2]->lost.empty()) << world[1]->reason << world[2]->reason;
}

TEST(Failure, CloseDoesNotWaitForHangingRank) {
  const World world = make_world(2, 1);
  const auto start = Clock::now();
  world[0]->transport->close(false);  // rank 1 does nothing
  EXPECT_LT(Clock::now() - start, 5s);
}

TEST(Failure, MessageToUnknownRankFailsTransport) {
  const World world = make_world(2, 1);
  const auto test_message = world[0]->send(0, {1, 1, 0}, 10);
  EXPECT_NE(world[0]->failure.find("between ranks 0 and 0"), std::string::npos) << world[0]->failure;
}

TEST(EpollWaiter, WakesOnMessage) {
  const World world = make_world(2, 1);
  const auto in = world[1]->receive(0, {1, 1, 0}, 100);
  poll_until_quiet(world);
  std::promise<void> sleeps;  // a message that arrives slightly earlier must end the sleep as well
  std::thread other([&] {
    EXPECT_EQ(sleeps.get_future().wait_for(20s), std::future_status::ready);
    world[0]->send(1, {1, 1, 0}, 100);
  });
  bool slept = false;
  const auto start = Clock::now();
  while (!in->done && Clock::now() - start < 20s) {
    if (world[1]->transport->poll(true)) continue;
    if (!world[1]->transport->waiter().arm()) continue;
    if (!std::exchange(slept, true)) sleeps.set_value();
    world[1]->transport->waiter().sleep(20s);
  }
  EXPECT_LT(Clock::now() - start, 10s);
  EXPECT_TRUE(in->done);
  other.join();
}

TEST(EpollWaiter, WakesWhenSocketIsWritable) {
  const World world = make_world(2, 1);
  const auto in = world[1]->receive(0, {1, 1, 0}, 64 << 20);
  const auto out = world[0]->send(1, {1, 1, 0}, 64 << 20);
  on_threads(world, [&](Node& node) {
    const auto& test_message = node.rank == 0 ? out : in;
    const auto start = Clock::now();
    while (!test_message->done && Clock::now() - start < 60s) {
      if (node.transport->poll(true)) continue;
      if (node.transport->waiter().arm()) node.transport->waiter().sleep(60s);
    }
    EXPECT_TRUE(test_message->done);
    EXPECT_LT(Clock::now() - start, 30s);
  });
}

TEST(EpollWaiter, WaitsWithoutEvents) {  // control: nothing else ends it
  comm::tcp::EpollWaiter waiter;
  const auto start = Clock::now();
  ASSERT_TRUE(waiter.arm());
  waiter.sleep(100ms);
  EXPECT_GE(Clock::now() - start, 99ms);
}

TEST(EpollWaiter, WakesOnWakeSinceArm) {
  comm::tcp::EpollWaiter waiter;
  for (int i = 0; i < 3; ++i) {
    waiter.arm();
    waiter.wake();
    const auto start = Clock::now();
    waiter.sleep(20s);
    EXPECT_LT(Clock::now() - start, 10s);
  }
  while (!waiter.arm()) {
  }
  const auto start = Clock::now();
  waiter.sleep(100ms);
  EXPECT_GE(Clock::now() - start, 99ms) << "an old wake ends no new sleep";
}

TEST(EpollWaiter, SeveralThreadsMissNoWakeup) {
  comm::tcp::EpollWaiter waiter;
  std::mutex lock;  // the engine's lock
  std::atomic<int> round{0};
  std::atomic<std::int64_t> longest{0};
  std::atomic<int> through{0};
  constexpr int kThreads = 3, kRounds = 500;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&] {
      for (int seen = 0; seen < kRounds; ++seen) {
        const auto start = Clock::now();
        while (round.load() <= seen) {
          bool armed = false;
          {
            const std::lock_guard guard(lock);
            armed = waiter.arm();
          }
          if (armed && round.load() <= seen) waiter.sleep(30s);
        }
        const std::int64_t took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start).count();
        for (std::int64_t before = longest; took > before && !longest.compare_exchange_weak(before, took);) {
        }
        ++through;
      }
    });
  for (int r = 1; r <= kRounds; ++r) {
    round = r;
    waiter.wake();
    while (through.load() < r * kThreads) std::this_thread::sleep_for(10us);
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(longest.load(), 25'000) << "somebody slept through a wake";
}

}  // namespace
}  // namespace tessera::tcp_test
