// TagMatchingTransport over a link that delivers at random times and in random order. One thread polls all ranks.
#include "tessera/comm/tag_matching_transport.h"

#include "tessera/comm/transport/cma.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "tests/backends/links/messages.h"
#include "tests/comm/fake_link.h"

namespace tessera::comm_test {
namespace {

using namespace link_test;

/// Provides only the rank and the token of its world.
class FakeBootstrap final : public Bootstrap {
 public:
  FakeBootstrap(int rank, std::uint8_t world) : rank_(rank) { token_.fill(world); }
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return 0; }
  bool in_process() const noexcept override { return true; }
  std::vector<std::string> all_gather(std::string_view) override { return {}; }
  std::unique_ptr<ControlChannel> open_channel(std::string_view, ControlEvents) override { return nullptr; }
  const std::vector<std::string>& hosts() const noexcept override { return hosts_; }
  const Token& token() const noexcept override { return token_; }
  std::string local_address() const override { return ""; }

 private:
  int rank_;
  Token token_{};
  std::vector<std::string> hosts_;
};

/// Bulk data moves over the link, or (near) by the kernel between the ranks' memory, which is in this process.
enum class LinkKind { link, cma };

struct World {
  explicit World(int size, std::uint64_t seed = 1, std::uint8_t number = 1, LinkKind kind = LinkKind::link) {
    net.dice.seed(seed);
    for (int r = 0; r < size; ++r) {
      ranks.push_back(std::make_unique<Rank>(r));
      const FakeBootstrap bootstrap(r, number);
      ranks.back()->transport = std::make_unique<TagMatchingTransport>(
          bootstrap, *ranks.back(), [&](LinkEvents& events) -> std::unique_ptr<Link> {
            const auto fake = [&](LinkEvents& link_events) { return std::make_unique<FakeLink>(net, r, link_events); };
            if (kind == LinkKind::link) return fake(events);
            return std::make_unique<CmaLink>(bootstrap, std::vector<int>(static_cast<std::size_t>(size), ::getpid()),
                                             events, fake);
          });
    }
  }
  Rank& operator[](std::size_t r) { return *ranks[r]; }
  void poll(int turns = 3000) {
    for (int i = 0; i < turns; ++i)
      for (const auto& rank : ranks) rank->transport->poll(i % 16 == 0);
  }
  Net net;
  std::vector<std::unique_ptr<Rank>> ranks;
};

/// Returns the first problem of a random exchange; "" if there is none.
std::string random_exchange(std::uint64_t seed, bool corrupts, LinkKind kind) {
  constexpr std::size_t kSizes[] = {0, 1, 99, 100, 101, 5000, 24575, 24576, 30000};
  World world(3, seed, 1, kind);
  world.net.corrupts = corrupts;
  std::mt19937_64 dice(seed * 7 + 1);
  struct Part {
    std::size_t rank;
    bool sends;
    int peer;
    MessageTag tag;
    std::size_t bytes;
  };
  std::vector<Part> parts;
  std::uint64_t payload = 0;
  for (std::uint32_t i = 0; i < 120; ++i) {
    const auto from = dice() % 3;
    const auto to = dice() % 3;
    const std::size_t bytes = kSizes[dice() % std::size(kSizes)];
    const MessageTag tag{i % 3, 0xffffffff - i / 9, i % 9};
    parts.push_back({from, true, static_cast<int>(to), tag, bytes});
    parts.push_back({to, false, static_cast<int>(from), tag, bytes});
    payload += bytes;
  }
  std::shuffle(parts.begin(), parts.end(), dice);
  std::vector<const TestMessage*> received;
  for (const Part& p : parts) {
    if (p.sends) world[p.rank].send(p.peer, p.tag, p.bytes);
    if (!p.sends) received.push_back(&world[p.rank].receive(p.peer, p.tag, p.bytes));
    if (dice() % 2 == 0) world.poll(1);
  }
  world.poll();
  for (const TestMessage* test_message : received)
    if (auto problem = Rank::problem(*test_message); !problem.empty()) return problem;
  std::uint64_t sent = 0;
  for (const auto& rank : world.ranks) sent += rank->sent;
  return sent == payload ? "" : "the meter is wrong";
}

TEST(TagMatchingTransport, MatchesMessagesInAnyOrder) {
  for (const LinkKind kind : {LinkKind::link, LinkKind::cma}) {
    for (std::uint64_t seed = 1; seed <= 200; ++seed)
      ASSERT_EQ(random_exchange(seed, false, kind), "") << "seed " << seed;
    EXPECT_NE(random_exchange(1, true, kind), "");  // negative control: a wrong byte is detected
  }
}

TEST(TagMatchingTransport, ReportsLengthOfSender) {
  constexpr std::size_t kSizes[] = {0, 50, 100, 101, 3000, 30000, 40000};
  for (std::uint64_t seed = 1; seed <= 40; ++seed)
    for (const std::size_t sent : kSizes)
      for (const std::size_t wanted : kSizes) {
        World world(2, seed, 1, seed % 3 == 0 ? LinkKind::cma : LinkKind::link);
        if (seed % 2 == 0) world[0].send(1, {1, 2, 3}, sent);
        world.poll(static_cast<int>(seed % 7));
        const TestMessage& got = world[1].receive(0, {1, 2, 3}, wanted);
        if (seed % 2 != 0) world[0].send(1, {1, 2, 3}, sent);
        world.poll(300);
        ASSERT_EQ(got.times_done, 1) << sent << " for " << wanted << ", seed " << seed;
        ASSERT_EQ(got.came, sent) << wanted << ", seed " << seed;
      }
}

/// True: canceled messages leave memory unchanged, and all later messages are right.
bool survives_cancel(std::uint64_t seed, bool writes_after_cancel, LinkKind kind = LinkKind::link) {
  World world(2, seed, 1, kind);
  world.net.writes_after_cancel = writes_after_cancel;
  std::mt19937_64 dice(seed);
  bool good = true;
  for (std::uint32_t i = 0; i < 30; ++i) {
    const std::size_t bytes = dice() % 3 == 0 ? 60 : 30000;
    const MessageTag tag{0, 1, i};
    const bool cancels_send = dice() % 2 == 0;
    const bool receiver_first = dice() % 2 == 0;
    if (receiver_first) world[1].receive(0, tag, bytes);
    world.poll(static_cast<int>(dice() % 4));
    TestMessage& sent = world[0].send(1, tag, bytes);
    world.poll(static_cast<int>(dice() % 4));
    if (!receiver_first) world[1].receive(0, tag, bytes);
    TestMessage& received = *world[1].test_messages.back();
    world.poll(static_cast<int>(dice() % 5));
    TestMessage& test_message = cancels_send ? sent : received;
    Rank& rank = cancels_send ? world[0] : world[1];
    if (test_message.times_done != 0) continue;
    rank.transport->cancel(test_message.message);
    const auto before = test_message.times_done;
    std::fill(test_message.memory.begin(), test_message.memory.end(), std::byte{0x11});
    world.poll(200);
    good &= before == 0 && test_message.times_done == 0;
    good &= std::all_of(test_message.memory.begin(), test_message.memory.end(),
                        [](std::byte b) { return b == std::byte{0x11}; });
    TestMessage& other =
        cancels_send ? received : sent;  // the other side is canceled too, before its tag is used again
    if (other.times_done == 0) (cancels_send ? world[1] : world[0]).transport->cancel(other.message);
    world.poll(200);
    const MessageTag next{0, 1, 1000 + i};
    const TestMessage& after = world[1].receive(0, next, bytes);
    world[0].send(1, next, bytes);
    world.poll(300);
    good &= Rank::problem(after).empty();
  }
  return good;
}

TEST(TagMatchingTransport, CanceledReceiveIsNotWritten) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed)
    for (const LinkKind kind : {LinkKind::link, LinkKind::cma})
      ASSERT_TRUE(survives_cancel(seed, false, kind)) << "seed " << seed;
  bool seen = false;  // negative control: a link that writes after the cancel
  for (std::uint64_t seed = 1; seed <= 20; ++seed) seen |= !survives_cancel(seed, true);
  EXPECT_TRUE(seen);
}

/// A sender cancels a message while the receiver reads it: it must not complete. Without the cancel both sides
/// complete.
TEST(TagMatchingTransport, CanceledSendDoesNotComplete) {
  World world(2, 4, 1, LinkKind::cma);
  constexpr std::size_t kBytes = std::size_t{3} << 20;  // several chunks
  for (const bool cancels : {false, true}) {
    const MessageTag tag{0, cancels ? 1u : 2u, 3};
    TestMessage& received = world[1].receive(0, tag, kBytes);
    TestMessage& sent = world[0].send(1, tag, kBytes);
    const auto begun = [&] { return received.memory.front() != kUntouched; };
    for (int turn = 0; turn < 3000 && !begun(); ++turn) world.poll(1);
    ASSERT_TRUE(begun());
    ASSERT_EQ(received.times_done, 0);  // the transfer is in progress
    if (cancels) {
      world[0].transport->cancel(sent.message);
      std::fill(sent.memory.begin(), sent.memory.end(), std::byte{0x11});
    }
    world.poll(300);
    EXPECT_EQ(received.times_done, cancels ? 0 : 1);
    EXPECT_EQ(sent.times_done, cancels ? 0 : 1);
    EXPECT_EQ(Rank::problem(received).empty(), !cancels);
    if (cancels) world[1].transport->cancel(received.message);
  }
}

TEST(TagMatchingTransport, CanceledCtsGetsNoData) {
  World world(2, 3);
  TestMessage& cancelled = world[1].receive(0, {0, 1, 2}, 3000);
  world.poll(100);  // the CTS waits at rank 0
  world[1].transport->cancel(cancelled.message);
  world.poll(100);
  const TestMessage& again = world[1].receive(0, {0, 1, 2}, 3000);
  world[0].send(1, {0, 1, 2}, 3000);
  world.poll(300);
  EXPECT_EQ(Rank::problem(again), "");
}

TEST(TagMatchingTransport, DiscardsMessagesOfOtherWorlds) {
  World old(2, 9, 1);
  old[0].send(1, {0, 1, 2}, 10);
  for (const std::uint8_t number : {1, 2}) {
    World now(2, 9, number);
    now.net.ams = old.net.ams;
    const TestMessage& got = now[1].receive(0, {0, 1, 2}, 10);
    now.poll(100);
    EXPECT_EQ(got.times_done, number == 1 ? 1 : 0);  // the first is the control: its messages are accepted
    if (got.times_done == 0) now[1].transport->cancel(now[1].test_messages.back()->message);
  }
}

TEST(TagMatchingTransport, DrainBufferEndsWithItsMessage) {
  World world(2, 8);
  TestMessage& cancelled = world[1].receive(0, {0, 1, 2}, 3000);
  EXPECT_FALSE(world[1].transport->needs_polls());
  world[1].transport->cancel(cancelled.message);
  EXPECT_TRUE(world[1].transport->needs_polls());
  EXPECT_EQ(world.net.receives.size(), 1u);
  world.poll(300);
  EXPECT_FALSE(world[1].transport->needs_polls());
  EXPECT_TRUE(world.net.receives.empty());
}

TEST(TagMatchingTransport, FailedAllocationClosesLink) {
  for (const bool receiving : {true, false}) {
    World world(2, 5);
    TestMessage& received = world[1].receive(0, {0, 1, 2}, 3000);
    world.net.stuck = true;
    TestMessage& sent = world[0].send(1, {0, 1, 2}, 3000);
    world.poll(100);
    Rank& rank = receiving ? world[1] : world[0];
    rank.transport->cancel((receiving ? received : sent).message);
    EXPECT_EQ(world.net.closed[receiving ? 1 : 0], static_cast<int>(Link::CloseMode::abortive));
    EXPECT_EQ(rank.failure, "");  // not from inside cancel()
    rank.transport->poll(true);
    EXPECT_NE(rank.failure, "");
    const TestMessage& later = rank.receive(receiving ? 0 : 1, {0, 1, 3}, 10);
    world.poll(100);
    EXPECT_EQ(later.times_done, 0);
    rank.transport->cancel(rank.test_messages.back()->message);
    rank.transport->close(false);
  }
}

TEST(TagMatchingTransport, ReportsCloseModeToLink) {
  World world(2, 6);
  world[0].transport->close(false);
  EXPECT_EQ(world.net.closed[0], static_cast<int>(Link::CloseMode::graceful));
  TestMessage& never = world[1].receive(0, {0, 1, 2}, 10);
  world[1].transport->cancel(never.message);
  world[1].transport->close(false);
  EXPECT_EQ(world.net.closed[1], static_cast<int>(Link::CloseMode::after_cancel));
}

TEST(TagMatchingTransport, UnreportedFailureDoesNotDelayClose) {
  World world(2, 8);
  world.net.events[1]->link_failed("out of order");
  EXPECT_TRUE(world[1].transport->needs_polls());
  world[1].transport->close(false);  // must not wait forever
}

TEST(TagMatchingTransport, ReportsLostPeer) {
  World world(2, 7);
  TestMessage& never = world[1].receive(0, {0, 1, 2}, 3000);
  world.net.events[1]->bulk_failed(never.message, "cable cut");
  world.net.receives.clear();
  EXPECT_EQ(world[1].lost, "");
  world[1].transport->poll(false);
  EXPECT_EQ(world[1].lost, "0: cable cut");
  EXPECT_EQ(never.times_done, 0);
  world[1].transport->cancel(never.message);
}

TEST(TagMatchingTransport, DiscardsMessagesOfDiscardedCommunicators) {
  for (const bool cancelled : {true, false}) {  // false is the control
    World world(2);
    world[0].send(1, {1, 1, 0}, 50);
    world[0].send(1, {1, 2, 0}, 5000);
    world[0].send(1, {2, 1, 0}, 50);
    world.poll();
    if (cancelled) world[1].transport->discard_communicator(1);
    world[0].send(1, {1, 3, 0}, 50);
    world.poll();
    const TestMessage* early = &world[1].receive(0, {1, 1, 0}, 50);
    const TestMessage* late = &world[1].receive(0, {1, 3, 0}, 50);
    const TestMessage* other = &world[1].receive(0, {2, 1, 0}, 50);
    world.poll();
    EXPECT_NE(Rank::problem(*early).empty(), cancelled);
    EXPECT_NE(Rank::problem(*late).empty(), cancelled);
    EXPECT_EQ(Rank::problem(*other), "");
  }
}

}  // namespace
}  // namespace tessera::comm_test
