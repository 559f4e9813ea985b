// Bit flips on the way to or from rank 0: in the rendezvous, in the exchange of blobs and in control messages. Each is
// retried or is an error that says so; damaged data is never accepted.
#include <atomic>
#include <condition_variable>
#include <mutex>

#include "tests/comm/rendezvous.h"
#include "tests/harness/flipping_proxy.h"

namespace tessera::comm_test {
namespace {

using harness::FlippingProxy;

constexpr std::size_t kChallenge = 5 + 8 + 4 + 64 + 1 + 8;
constexpr std::size_t kReply = 5 + 1 + 2 + 32 + 8;
constexpr std::size_t kHello = 2 * (5 + 20 + 2 + 5 + 1 + 96 + 8);  // the two of a rank of 'run-1'
constexpr std::size_t kSeal = 9 + 16;                              // of every later frame
const std::string kBlob(600, 'b');

/// Events that a rank received on its channel.
struct Receiver {
  std::mutex mutex;
  std::condition_variable changed;
  std::string received;
  int damaged = -1;
  int lost = -1;

  ControlEvents events() {
    return {.lost = [this](int rank) { update([&] { lost = rank; }); },
            .message = [this](int, std::string_view text) { update([&] { received += text; }); },
            .damaged = [this](int rank) { update([&] { damaged = rank; }); }};
  }
  template <class F>
  void update(F&& change) {
    const std::lock_guard lock(mutex);
    change();
    changed.notify_all();
  }
  bool receives(const std::string& text) {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, 20s, [&] { return received.size() >= text.size() || damaged >= 0 || lost >= 0; });
    return received == text && damaged < 0 && lost < 0;
  }
};

struct World {
  std::array<std::string, 2> errors;
  std::array<Receiver, 2> receivers;
  std::array<bool, 2> right{};  // all received data equals the data sent
  bool flipped = false;
  bool all_right() const { return right[0] && right[1] && errors[0].empty() && errors[1].empty(); }
};

/// Runs the rendezvous of two ranks over a proxy; they exchange blobs, and send each other `text` on a channel.
void run(World& world, std::optional<FlippingProxy::Flip> flip, const std::string& text = "some words") {
  FlippingProxy proxy(0, flip);
  const int port = free_port();
  proxy.aim(port);
  std::vector<std::thread> ranks;
  for (int r = 0; r < 2; ++r)
    ranks.emplace_back([&, r] {
      const auto i = static_cast<std::size_t>(r);
      std::shared_ptr<Bootstrap> bootstrap;
      std::unique_ptr<ControlChannel> channel;
      world.errors[i] = error_of([&] {
        RendezvousOptions one = options_of(r, 2, r == 0 ? port : proxy.port());
        one.host_id = r == 0 ? "east" : "west";
        if (r == 1) connect_when_open(port);
        bootstrap = rendezvous(one);
        const std::vector<std::string> blobs = bootstrap->all_gather(kBlob + std::to_string(r));
        world.right[i] = blobs == std::vector<std::string>{kBlob + "0", kBlob + "1"};
        channel = bootstrap->open_channel("test", world.receivers[i].events());
        channel->send(1 - r, text);
        world.right[i] = world.right[i] && world.receivers[i].receives(text);
      });
      // The rank that leaves first closes the connection, so it waits until its peer has received everything.
      if (world.errors[i].empty()) world.receivers[1 - i].receives(text);
    });
  for (std::thread& rank : ranks) rank.join();
  world.flipped = proxy.flipped();
}

TEST(BitFlips, NoFlipTransfersCorrectly) {  // the control of the tests below
  World world;
  run(world, std::nullopt);
  EXPECT_TRUE(world.all_right()) << world.errors[0] << world.errors[1];
}

TEST(BitFlips, HandshakeIsRetried) {
  for (const bool to_listener : {true, false})
    for (std::size_t at = 3; at < (to_listener ? kHello + 1 : kChallenge + kReply); at += 6) {
      if (at % kChallenge < 5) continue;  // a length, for whose bytes the rank waits: the test below
      World world;
      run(world, FlippingProxy::Flip{.to_listener = to_listener, .at = at, .bit = 1});
      EXPECT_TRUE(world.flipped);
      EXPECT_TRUE(world.all_right()) << to_listener << " " << at << " " << world.errors[0] << world.errors[1];
    }
}

TEST(BitFlips, DamagedLengthInHandshakeEndsSoon) {
  World world;
  const auto start = steady_clock::now();
  run(world, FlippingProxy::Flip{.to_listener = false, .at = 2, .bit = 0});  // declares 256 bytes more
  EXPECT_TRUE(world.all_right()) << world.errors[0] << world.errors[1];
  EXPECT_LT(steady_clock::now() - start, 9s);
}

TEST(BitFlips, DamagedExchangeFailsBothRanks) {
  for (const bool to_listener : {true, false}) {
    const std::size_t begin = to_listener ? kHello + 1 : kChallenge + kReply;
    std::string text = "BackendError: init: a message from ";
    text.append(to_listener ? "rank 1 to rank 0" : "rank 0 to rank 1");
    text.append(
        " is damaged or forged: its authentication code is wrong; check the network between the two, and start again");
    for (std::size_t at = begin; at < begin + 200; at += at < begin + 9 ? 1 : 40) {  // each byte of a header
      World world;
      const auto start = steady_clock::now();
      run(world, FlippingProxy::Flip{.to_listener = to_listener, .at = at, .bit = 2});
      EXPECT_TRUE(world.flipped);
      EXPECT_EQ(world.errors[0], text) << at - begin;
      EXPECT_EQ(world.errors[1], text) << at - begin;
      EXPECT_LT(steady_clock::now() - start, 5s) << "a length that is waited for: " << at - begin;
    }
  }
}

TEST(BitFlips, DamagedControlMessageFailsReceiverOnly) {
  const std::string text(30'000, 't');
  for (const bool to_listener : {true, false}) {
    World world;
    run(world, FlippingProxy::Flip{.to_listener = to_listener, .at = 20'000, .bit = 2}, text);
    EXPECT_TRUE(world.flipped);
    Receiver& hurt = world.receivers[to_listener ? 0 : 1];
    Receiver& well = world.receivers[to_listener ? 1 : 0];
    EXPECT_EQ(hurt.damaged, to_listener ? 1 : 0);
    EXPECT_EQ(hurt.received, "");
    EXPECT_EQ(well.received, text);
    EXPECT_EQ(well.damaged, -1);
  }
}

TEST(BitFlips, DamagedChannelOpeningIsError) {
  // Rank 1 sends the hello, the byte after it, its introduction and its blob, and then opens the channel.
  const std::size_t blob = kSeal + kBlob.size() + 1;
  for (std::size_t introduction = 20; introduction < 180; introduction += 20) {
    // The length of the introduction depends on the machine: the first flip after the blob determines it.
    World hurt;
    run(hurt, FlippingProxy::Flip{.to_listener = true, .at = kHello + 1 + kSeal + introduction + blob + 11, .bit = 0});
    if (hurt.errors[0].find("control channel") == std::string::npos) continue;
    EXPECT_EQ(hurt.errors[0],
              "BackendError: init: control channel 'test' can't be opened: a message from rank 1 is damaged or forged; "
              "check the network between the hosts, and start again");
    return;
  }
  FAIL() << "no flip hit the channel's opening";
}

}  // namespace
}  // namespace tessera::comm_test
