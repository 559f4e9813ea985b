// Messages of all sizes, in all orders, over several connections.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>

#include "backends/tcp/frame.h"
#include "tests/backends/tcp/support.h"

namespace tessera::tcp_test {
namespace {

using comm::tcp::kCredit;
using comm::tcp::kEagerLimit;
using comm::tcp::kMaxChunk;

std::vector<std::size_t> sizes(std::mt19937& random) {
  std::vector<std::size_t> all = {0,
                                  1,
                                  7,
                                  4097,
                                  16336,
                                  16384,
                                  kEagerLimit,
                                  kMaxChunk,
                                  kMaxChunk + 1,
                                  kEagerLimit - 1,
                                  kEagerLimit + 1,
                                  3 * kMaxChunk + 5};
  std::uniform_int_distribution<int> magnitude(0, 20);
  for (int i = 0; i < 100; ++i) all.push_back(random() % (std::size_t{1} << magnitude(random)));
  return all;
}

/// Sends to every other rank and receives from it, both in random order, with pauses.
void exchange_all(Node& node, int ranks, unsigned seed, bool mixed_up) {
  std::mt19937 same(seed), own(seed * 31 + static_cast<unsigned>(node.rank));
  const std::vector<std::size_t> lengths = sizes(same);
  struct Action {
    int peer;
    std::uint32_t number;
    bool sends;
  };
  std::vector<Action> actions;
  for (int peer = 0; peer < ranks; ++peer)
    for (std::uint32_t i = 0; i < lengths.size() && peer != node.rank; ++i)
      for (const bool sends : {false, true}) actions.push_back({peer, i, sends});
  std::shuffle(actions.begin(), actions.end(), own);

  std::vector<std::unique_ptr<TestMessage>> test_messages;
  for (const Action& action : actions) {
    // The communicator of the tag depends on the direction, so that the two messages never have the same content.
    const int from = action.sends ? node.rank : action.peer;
    const MessageTag tag{static_cast<std::uint32_t>(from), action.number, 7};
    test_messages.push_back(action.sends ? node.send(action.peer, tag, lengths[action.number])
                                         : node.receive(action.peer, tag, lengths[action.number]));
    if (own() % 4 == 0) node.transport->poll(own() % 16 == 0);
    if (own() % 32 == 0) std::this_thread::sleep_for(200us);
  }
  ASSERT_TRUE(node.until([&] { return node.finished == test_messages.size(); }))
      << node.finished << " of " << test_messages.size();
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < test_messages.size(); ++i) {
    EXPECT_EQ(test_messages[i]->came, test_messages[i]->message.bytes);
    // The control expects the content of another message of the same length.
    if (mixed_up) test_messages[i]->message.tag.operation += 1;
    wrong += intact(*test_messages[i], test_messages[i]->memory.size()) ? 0 : 1;
  }
  if (mixed_up)
    EXPECT_GT(wrong, test_messages.size() / 2);
  else
    EXPECT_EQ(wrong, 0U);
  EXPECT_TRUE(node.lost.empty()) << node.reason;
  node.transport->close(false);
  EXPECT_TRUE(node.lost.empty()) << node.reason;
}

class Messages : public testing::TestWithParam<std::pair<int, int>> {};

TEST_P(Messages, ArriveCompleteAtTheirReceiver) {
  const auto [ranks, streams] = GetParam();
  for (unsigned seed = 1; seed <= 2; ++seed) {
    const World world = make_world(ranks, streams);
    on_threads(world, [&, n = ranks](Node& node) { exchange_all(node, n, seed, false); });
  }
}
INSTANTIATE_TEST_SUITE_P(Worlds, Messages,
                         testing::Values(std::pair(2, 1), std::pair(2, 2), std::pair(2, 4), std::pair(3, 2),
                                         std::pair(4, 1)),
                         [](const auto& which) {
                           return std::to_string(which.param.first) + "ranks" + std::to_string(which.param.second) +
                                  "streams";
                         });

TEST(Messages, DetectsMisdirectedMessages) {
  const World world = make_world(2, 2);
  on_threads(world, [](Node& node) { exchange_all(node, 2, 1, true); });
}

TEST(Messages, TransferFortyMegabytesInBothDirections) {
  const World world = make_world(2, 2);
  on_threads(world, [](Node& node) {
    constexpr std::size_t kBytes = 40'000'001;
    const int peer = 1 - node.rank;
    std::atomic<std::uint64_t> sent{0};
    auto out = node.test_message(peer, {static_cast<std::uint32_t>(node.rank), 1, 0}, kBytes);
    fill(*out);
    out->message.sent = &sent;
    node.transport->send(out->message);
    if (node.rank == 1) std::this_thread::sleep_for(20ms);
    const auto in = node.receive(peer, {static_cast<std::uint32_t>(peer), 1, 0}, kBytes);
    ASSERT_TRUE(node.until([&] { return node.finished == 2; }));
    EXPECT_TRUE(intact(*in, kBytes));
    EXPECT_EQ(sent.load(), kBytes) << "payload only";
    node.transport->close(false);
  });
}

TEST(Messages, LargeMessageWaitsForCts) {
  const World world = make_world(2, 2);
  std::atomic<std::uint64_t> sent{0};
  auto out = world[0]->test_message(1, {1, 1, 0}, kEagerLimit + 1);
  fill(*out);
  out->message.sent = &sent;
  world[0]->transport->send(out->message);
  poll_until_quiet(world);
  EXPECT_EQ(sent.load(), 0U);
  const auto in = world[1]->receive(0, {1, 1, 0}, kEagerLimit + 1);
  ASSERT_TRUE(poll_until(world, [&] { return in->done && out->done; }));
  EXPECT_EQ(sent.load(), kEagerLimit + 1);
  EXPECT_TRUE(intact(*in, in->memory.size()));
  EXPECT_EQ(world[0]->transport->peer(1)->send_queue().entries(), 0U);
  EXPECT_EQ(world[1]->transport->peer(0)->receive_queue().entries(), 0U);
  close(world);
}

TEST(Messages, UnexpectedMessagesAreBoundedAndBlockNoOther) {
  const World world = make_world(2, 2);
  constexpr std::uint32_t kCount = 3000;
  const auto length = [](std::uint32_t i) { return std::size_t{i * 37 % 5000}; };
  std::vector<std::unique_ptr<TestMessage>> out, in;
  for (std::uint32_t i = 0; i < kCount; ++i) out.push_back(world[0]->send(1, {1, i, 0}, length(i)));
  poll_until_quiet(world);
  EXPECT_LE(world[1]->transport->peer(0)->receive_queue().held(), kCredit);
  EXPECT_GT(world[1]->transport->peer(0)->receive_queue().held(), kCredit / 2);
  EXPECT_LT(world[0]->finished, kCount);

  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{100}, 3 * kMaxChunk}) {  // other messages still get through
    const auto later = world[0]->send(1, {2, static_cast<std::uint32_t>(bytes), 0}, bytes);
    const auto expected = world[1]->receive(0, {2, static_cast<std::uint32_t>(bytes), 0}, bytes);
    ASSERT_TRUE(poll_until(world, [&] { return later->done && expected->done; })) << bytes;
    EXPECT_TRUE(intact(*expected, bytes));
  }
  for (std::uint32_t i = kCount; i-- > 0;) in.push_back(world[1]->receive(0, {1, i, 0}, length(i)));
  ASSERT_TRUE(poll_until(world, [&] { return world[0]->finished == kCount + 3 && world[1]->finished == kCount + 3; }));
  for (const auto& test_message : in) EXPECT_TRUE(intact(*test_message, test_message->memory.size()));
  EXPECT_EQ(world[1]->transport->peer(0)->receive_queue().held(), 0U);
  close(world);
}

TEST(Messages, OneWayStreamNeverRunsOutOfCredit) {
  const World world = make_world(2, 1);
  for (std::uint32_t i = 0; i < 2000; ++i) {
    const auto in = world[1]->receive(0, {1, i, 0}, 3000);
    const auto out = world[0]->send(1, {1, i, 0}, 3000);
    ASSERT_TRUE(poll_until(world, [&] { return in->done && out->done; })) << i;
  }
  // Without credit, messages would have used the rendezvous protocol.
  EXPECT_EQ(world[1]->transport->peer(0)->receive_queue().rts_count(), 0U);
  close(world);
}

TEST(Messages, ReportTheirLength) {
  const World world = make_world(2, 2);
  const std::vector<std::size_t> lengths = {0, 10, 3000, kEagerLimit, kEagerLimit + 1, 2 * kMaxChunk + 3};
  std::uint32_t number = 0;
  for (const std::size_t sent : lengths)
    for (const std::size_t expected : lengths)
      for (const bool early : {false, true}) {
        const MessageTag tag{1, ++number, 0};
        std::unique_ptr<TestMessage> in;
        if (early) in = world[1]->receive(0, tag, expected);
        const auto out = world[0]->send(1, tag, sent);
        if (!early) poll_until_quiet(world, 2ms);
        if (!early) in = world[1]->receive(0, tag, expected);
        ASSERT_TRUE(poll_until(world, [&] { return in->done && out->done; })) << sent << " for " << expected;
        EXPECT_EQ(in->came, sent);
        EXPECT_TRUE(intact(*in, std::min(sent, expected)));
      }
  const auto out = world[0]->send(1, {2, 0, 0}, 5000);  // the connection still works
  const auto in = world[1]->receive(0, {2, 0, 0}, 5000);
  ASSERT_TRUE(poll_until(world, [&] { return in->done && out->done; }));
  EXPECT_TRUE(intact(*in, 5000));
  close(world);
}

}  // namespace
}  // namespace tessera::tcp_test
