// Messages that are canceled in any state: their memory is never accessed again, and other messages continue.
#include <algorithm>
#include <cstring>

#include "backends/tcp/frame.h"
#include "backends/tcp/send_queue.h"
#include "tests/backends/tcp/support.h"

namespace tessera::tcp_test {
namespace {

using comm::tcp::kEagerLimit;

constexpr std::size_t kLarge = 24 << 20;
constexpr std::byte kPoison{0xA5};

void poison(TestMessage& test_message) { std::fill(test_message.memory.begin(), test_message.memory.end(), kPoison); }
bool still_poisoned(const TestMessage& test_message) {
  for (const std::byte byte : test_message.memory)
    if (byte != kPoison) return false;
  return true;
}

/// The connection between the two ranks still works, for small and large messages.
void expect_usable(const World& world) {
  static std::uint32_t number = 1000;
  for (const std::size_t bytes : {std::size_t{100}, kEagerLimit + 1, std::size_t{3 << 20}})
    for (const int from : {0, 1}) {
      const MessageTag tag{9, ++number, 0};
      const auto in = world[static_cast<std::size_t>(1 - from)]->receive(from, tag, bytes);
      const auto out = world[static_cast<std::size_t>(from)]->send(1 - from, tag, bytes);
      ASSERT_TRUE(poll_until(world, [&] { return in->done && out->done; })) << world[0]->reason << world[1]->reason;
      EXPECT_TRUE(intact(*in, bytes));
    }
  EXPECT_TRUE(world[0]->lost.empty() && world[1]->lost.empty());
}

/// A large message that has been sent and received in part.
struct HalfWay {
  World world = make_world(2, 2);
  std::unique_ptr<TestMessage> in, out;
  std::atomic<std::uint64_t> sent{0};
  HalfWay() {
    in = world[1]->receive(0, {1, 1, 0}, kLarge);
    out = world[0]->test_message(1, {1, 1, 0}, kLarge);
    out->message.sent = &sent;
    fill(*out);
    world[0]->transport->send(out->message);
    EXPECT_TRUE(poll_until(world, [&] { return sent.load() > kLarge / 4; }));
    EXPECT_FALSE(in->done || out->done);
  }
};

TEST(Cancel, HalfReceivedMessageIsNotWritten) {
  HalfWay half;
  half.world[1]->transport->cancel(half.in->message);
  poison(*half.in);
  std::memset(static_cast<void*>(&half.in->message), 0, sizeof(Message));
  ASSERT_TRUE(poll_until(half.world, [&] { return half.out->done; })) << "the sender is not held up";
  poll_until_quiet(half.world);
  EXPECT_TRUE(still_poisoned(*half.in));
  EXPECT_FALSE(half.in->done);
  EXPECT_EQ(half.world[1]->transport->peer(0)->receive_queue().entries(), 0U);
  expect_usable(half.world);
  close(half.world);
}

TEST(Cancel, DetectsWriteOfUncanceledReceive) {
  HalfWay half;
  poison(*half.in);
  ASSERT_TRUE(poll_until(half.world, [&] { return half.out->done && half.in->done; }));
  EXPECT_FALSE(still_poisoned(*half.in));
}

TEST(Cancel, HalfSentMessageCompletesFromCopy) {
  HalfWay half;
  half.world[0]->transport->cancel(half.out->message);
  poison(*half.out);
  std::memset(static_cast<void*>(&half.out->message), 0, sizeof(Message));
  const std::uint64_t sent = half.sent.load();
  ASSERT_TRUE(poll_until(half.world, [&] { return half.in->done; }));
  EXPECT_TRUE(intact(*half.in, kLarge)) << "it must be what it was when it was given up";
  EXPECT_FALSE(half.out->done);
  EXPECT_EQ(half.sent.load(), sent) << "the owner's counter may be gone";
  expect_usable(half.world);
  close(half.world);
}

TEST(Cancel, DetectsUncanceledSender) {
  HalfWay half;
  poison(*half.out);
  ASSERT_TRUE(poll_until(half.world, [&] { return half.in->done; }));
  EXPECT_FALSE(intact(*half.in, kLarge));
}

TEST(Cancel, SendAndReceive) {
  HalfWay half;
  half.world[1]->transport->cancel(half.in->message);
  half.world[0]->transport->cancel(half.out->message);
  poison(*half.in);
  half.out.reset();
  poll_until_quiet(half.world);
  EXPECT_TRUE(still_poisoned(*half.in));
  expect_usable(half.world);
  close(half.world);
}

TEST(Cancel, ReceiveBeforeItsMessage) {
  const World world = make_world(2, 2);
  std::uint32_t number = 0;
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{500}, kEagerLimit, kEagerLimit + 1, std::size_t{2 << 20}}) {
    auto in = world[1]->receive(0, {1, ++number, 0}, bytes);
    poll_until_quiet(world, 2ms);
    world[1]->transport->cancel(in->message);
    poison(*in);
    const auto out = world[0]->send(1, {1, number, 0}, bytes);
    ASSERT_TRUE(poll_until(world, [&] { return out->done; })) << bytes;
    poll_until_quiet(world);
    EXPECT_TRUE(still_poisoned(*in));
    EXPECT_EQ(world[1]->transport->peer(0)->receive_queue().entries(), 0U);
    EXPECT_EQ(world[1]->transport->peer(0)->receive_queue().held(), 0U);
  }
  expect_usable(world);
  close(world);
}

TEST(Cancel, SendWithoutCts) {
  const World world = make_world(2, 2);
  auto out = world[0]->send(1, {1, 1, 0}, kLarge);
  poll_until_quiet(world);  // its RTS has arrived
  world[0]->transport->cancel(out->message);
  out.reset();
  auto in = world[1]->receive(0, {1, 1, 0}, kLarge);
  poll_until_quiet(world);
  EXPECT_FALSE(in->done);
  world[1]->transport->cancel(in->message);
  in.reset();
  expect_usable(world);
  close(world);
}

TEST(Cancel, EagerSendsThatWaitForCredit) {
  const World world = make_world(2, 1);
  std::vector<std::unique_ptr<TestMessage>> out;
  for (std::uint32_t i = 0; i < 64; ++i) {  // the peer does not read: first the connection fills up, then the credit
    out.push_back(world[0]->send(1, {1, i, 0}, kEagerLimit));
    if (!out.back()->done) break;
  }
  for (std::uint32_t i = 64; i < 100; ++i) out.push_back(world[0]->send(1, {1, i, 0}, kEagerLimit - i));
  std::size_t cancelled = 0;
  for (auto& test_message : out) {
    if (test_message->done) continue;
    world[0]->transport->cancel(test_message->message);
    test_message.reset();
    ++cancelled;
  }
  EXPECT_GT(cancelled, 30U);
  poll_until_quiet(world);
  expect_usable(world);
  close(world);
}

TEST(Cancel, QueuedEagerSendsReturnCredit) {
  std::vector<comm::tcp::FrameSeal> seals;
  seals.emplace_back(false);
  comm::tcp::SendQueue queue;
  queue.connect(std::move(seals));
  std::vector<std::byte> data(kEagerLimit);
  for (std::uint32_t i = 0; i < 100; ++i) {  // more than six times the credit
    Message message;
    message.peer = 1;
    message.tag = {1, i, 0};
    message.data = data.data();
    message.bytes = data.size();
    queue.send(message);
    ASSERT_TRUE(queue.cancel(message));
  }
  EXPECT_FALSE(queue.has_work(0)) << "without credit, a message announces itself";
}

TEST(Cancel, HalfReceivedUnexpectedMessage) {
  const World world = make_world(2, 1);
  // The receiver reads while the sender's connection is full: some messages are half received when their receive is
  // posted.
  std::vector<std::unique_ptr<TestMessage>> out, in;
  for (std::uint32_t i = 0; i < 15; ++i) out.push_back(world[0]->send(1, {1, i, 0}, kEagerLimit));
  for (std::uint32_t i = 0; i < 15; ++i) {
    world[1]->transport->poll(false);
    in.push_back(world[1]->receive(0, {1, i, 0}, kEagerLimit));
    if (in.back()->done) continue;
    world[1]->transport->cancel(in.back()->message);
    poison(*in.back());
  }
  ASSERT_TRUE(poll_until(world, [&] { return world[0]->finished == 15; }));
  poll_until_quiet(world);
  for (const auto& test_message : in)
    EXPECT_TRUE(test_message->done ? intact(*test_message, kEagerLimit) : still_poisoned(*test_message));
  EXPECT_EQ(world[1]->transport->peer(0)->receive_queue().held(), 0U);
  expect_usable(world);
  close(world);
}

/// Small messages that are never received use up eager credit, again and again.
void send_in_vain(const World& world, std::uint32_t communicator, bool discarded_before) {
  const auto& transport = world[1]->transport;
  std::vector<std::unique_ptr<TestMessage>> out, in;
  if (discarded_before) transport->discard_communicator(communicator);
  for (std::uint32_t i = 0; i < 5; ++i) out.push_back(world[0]->send(1, {communicator, i, 0}, kEagerLimit));
  if (!discarded_before) in.push_back(world[1]->receive(0, {communicator, 100, 0}, 100));
  poll_until_quiet(world, 2ms);
  for (auto& test_message : out) world[0]->transport->cancel(test_message->message);
  if (discarded_before) return;
  transport->cancel(in.front()->message);
  transport->discard_communicator(communicator);
}

bool is_eager(const World& world, const MessageTag& tag) {
  const auto out = world[0]->send(1, tag, kEagerLimit);
  const bool went = poll_until(
      world, [&] { return out->done; }, 200ms);
  const auto in = world[1]->receive(0, tag, kEagerLimit);
  EXPECT_TRUE(poll_until(world, [&] { return in->done && out->done; }));
  EXPECT_TRUE(intact(*in, kEagerLimit));
  return went;
}

TEST(DiscardedCommunicator, ReleasesEagerCredit) {
  const World world = make_world(2, 1);
  for (std::uint32_t communicator = 10; communicator < 60; ++communicator) {
    send_in_vain(world, communicator, communicator % 2 == 0);
    poll_until_quiet(world, 2ms);
    EXPECT_EQ(world[1]->transport->peer(0)->receive_queue().held(), 0U);
    EXPECT_EQ(world[1]->transport->peer(0)->receive_queue().entries(), 0U);
    EXPECT_EQ(world[0]->transport->peer(1)->send_queue().entries(), 0U);
  }
  EXPECT_TRUE(is_eager(world, {2, 1, 0}));
  expect_usable(world);
  close(world);
}

TEST(DiscardedCommunicator, DetectsCommunicatorThatIsKept) {
  const World world = make_world(2, 1);
  for (std::uint32_t communicator = 10; communicator < 14; ++communicator) {
    std::vector<std::unique_ptr<TestMessage>> out;
    for (std::uint32_t i = 0; i < 5; ++i) out.push_back(world[0]->send(1, {communicator, i, 0}, kEagerLimit));
    poll_until_quiet(world, 2ms);
    for (auto& test_message : out) world[0]->transport->cancel(test_message->message);
  }
  EXPECT_FALSE(is_eager(world, {2, 1, 0}));
}

/// Large messages, one of them with an RTS and one half received, and a CTS without a reply.
TEST(DiscardedCommunicator, SupportsLargeMessagesInFlight) {
  HalfWay half;
  const auto large_receive = half.world[1]->receive(0, {1, 2, 0}, kLarge);
  const auto large_send = half.world[0]->send(1, {1, 3, 0}, kLarge);
  poll_until_quiet(half.world, 2ms);
  half.world[0]->transport->cancel(half.out->message);
  half.world[0]->transport->cancel(large_send->message);
  half.world[0]->transport->discard_communicator(1);
  half.world[1]->transport->cancel(half.in->message);
  half.world[1]->transport->cancel(large_receive->message);
  half.world[1]->transport->discard_communicator(1);
  poll_until_quiet(half.world);
  EXPECT_EQ(half.world[0]->transport->peer(1)->send_queue().entries(), 0U);
  EXPECT_LE(half.world[1]->transport->peer(0)->receive_queue().entries(), 1U);  // the data of a CTS may still arrive
  expect_usable(half.world);
  close(half.world);
}

TEST(Cancel, CompletedOperationIsUnaffected) {
  const World world = make_world(2, 1);
  const auto in = world[1]->receive(0, {1, 1, 0}, 100);
  const auto out = world[0]->send(1, {1, 1, 0}, 100);
  ASSERT_TRUE(poll_until(world, [&] { return in->done && out->done; }));
  world[0]->transport->cancel(out->message);
  world[1]->transport->cancel(in->message);
  expect_usable(world);
  close(world);
}

}  // namespace
}  // namespace tessera::tcp_test
