#include "tests/backends/links/transport_ranks.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <stdexcept>
#include <thread>

#include "tessera/base/env.h"
#include "tessera/comm/bootstrap/rendezvous.h"
#include "tests/backends/links/messages.h"

namespace tessera::link_test {
namespace {

using namespace std::chrono_literals;

constexpr MessageTag kTag{7, 0xfffffffe, (1u << 24) - 5};  // near the limits of a tag

void expect(bool good, const std::string& what) {
  if (!good) throw std::runtime_error(what);
}

MessageTag tag_number(std::uint32_t i) { return {i % 5 * 1000, kTag.operation + i / 64, kTag.step - i % 64}; }

/// A barrier in which the ranks keep polling until all have arrived, so that no message waits for a rank outside the
/// library.
void synchronize(Rank& me, Bootstrap& bootstrap, std::uint32_t number) {
  std::vector<TestMessage*> all;
  for (int peer = 0; peer < bootstrap.size(); ++peer) {
    if (peer == me.rank) continue;
    all.push_back(&me.receive(peer, {4000, number, 0}, 4));
    all.push_back(&me.send(peer, {4000, number, 0}, 4));
  }
  const auto done = [](const TestMessage* test_message) { return test_message->times_done == 1; };
  expect(me.until([&] { return std::all_of(all.begin(), all.end(), done); }), "the ranks did not meet again");
}

struct Planned {
  int from, to;
  MessageTag tag;
  std::size_t bytes;
};

/// The same plan on every rank: `count` messages from each rank to each rank (also to itself).
std::vector<Planned> plan(int ranks, std::uint32_t count) {
  constexpr std::size_t kSizes[] = {0, 1, 7, 64, 1000, 4096, 8063, 8064, 8065, 9000, 20'000, 65'536, 70'001, 300'000};
  std::vector<Planned> all;
  for (int from = 0; from < ranks; ++from)
    for (int to = 0; to < ranks; ++to)
      for (std::uint32_t i = 0; i < count; ++i) {
        const std::uint64_t dice = scramble(static_cast<std::uint64_t>(from * 64 + to) * 100'000 + i + 1);
        all.push_back({from, to, tag_number(i), i == 17 ? 9'000'000 : kSizes[dice % std::size(kSizes)]});
      }
  return all;
}

/// Every rank issues its part of the plan in its own order and polls now and then.
void messages(Rank& me, Bootstrap& bootstrap) {
  auto all = plan(bootstrap.size(), 120);
  std::mt19937_64 dice(static_cast<std::uint64_t>(me.rank) + 5);
  std::shuffle(all.begin(), all.end(), dice);
  std::uint64_t payload = 0;
  std::vector<const TestMessage*> received;
  for (const Planned& p : all) {
    if (p.to == me.rank) received.push_back(&me.receive(p.from, p.tag, p.bytes));
    if (p.from == me.rank) {
      me.send(p.to, p.tag, p.bytes);
      payload += p.bytes;
    }
    if (dice() % 4 == 0) me.transport->poll(false);
  }
  expect(me.until([&] { return me.finished == me.test_messages.size(); }), "messages did not arrive in time");
  for (const TestMessage* test_message : received)
    expect(Rank::problem(*test_message).empty(), Rank::problem(*test_message));
  expect(me.sent == payload, std::to_string(me.sent) + " bytes counted instead of " + std::to_string(payload));
}

/// For all pairs of lengths, the receiver gets the sender's length, and no byte outside its memory changes.
void lengths(Rank& me, Bootstrap& bootstrap) {
  constexpr std::size_t kSizes[] = {0, 10, 8000, 8064, 8065, 100'000, 5'000'000};
  std::uint32_t i = 0;
  for (const std::size_t sent : kSizes)
    for (const std::size_t wanted : kSizes) {
      if (sent == wanted) continue;
      for (const bool sender_first : {true, false}) {
        const MessageTag tag = tag_number(i++);
        if (me.rank == 0) {
          if (!sender_first) synchronize(me, bootstrap, i);
          me.send(1, tag, sent);
          if (sender_first) synchronize(me, bootstrap, i);
        }
        if (me.rank == 1) {
          if (sender_first) synchronize(me, bootstrap, i);
          TestMessage& got = me.receive(0, tag, wanted);
          if (!sender_first) synchronize(me, bootstrap, i);
          expect(me.until([&] { return got.times_done != 0; }),
                 "nothing came of " + std::to_string(sent) + " bytes for " + std::to_string(wanted));
          expect(got.came == sent, std::to_string(got.came) + " bytes reported instead of " + std::to_string(sent));
        }
        if (me.rank > 1) synchronize(me, bootstrap, i);
      }
    }
  synchronize(me, bootstrap, 100'000);
  for (const auto& test_message : me.test_messages)  // never received
    if (test_message->times_done == 0) me.transport->cancel(test_message->message);
  synchronize(me, bootstrap, 100'001);
}

/// Cancels a message; its memory then belongs to the caller, which overwrites it.
void cancel_message(Rank& me, TestMessage& test_message) {
  me.transport->cancel(test_message.message);
  std::fill(test_message.memory.begin(), test_message.memory.end(), std::byte{0x11});
  test_message.message = Message{};  // no longer referenced
}

void expect_left_alone(const TestMessage& test_message) {
  expect(test_message.times_done == 0, "a message that was given up was done");
  const bool same = std::all_of(test_message.memory.begin(), test_message.memory.end(),
                                [](std::byte b) { return b == std::byte{0x11}; });
  expect(same, "memory was written after its message was given up");
}

/// Receives and sends are canceled before, during and after their peers' calls; everything else still works.
void cancel(Rank& me, Bootstrap& bootstrap) {
  std::mt19937_64 dice(static_cast<std::uint64_t>(me.rank) + 77);
  std::uint32_t number = 0;
  for (const std::size_t bytes : {std::size_t{100}, std::size_t{50'000}, std::size_t{20'000'000}})
    for (int round = 0; round < 6; ++round) {
      const MessageTag tag = tag_number(1000 + number++);
      std::vector<TestMessage*> cancelled;
      synchronize(me, bootstrap, 3 * number);
      const bool sends = me.rank % 2 == 0;
      const int peer = me.rank ^ 1;
      if (peer < bootstrap.size() && (round % 3 != 0 || sends) && (round % 3 != 1 || !sends)) {
        TestMessage& test_message = sends ? me.send(peer, tag, bytes) : me.receive(peer, tag, bytes);
        for (std::uint64_t polls = dice() % 30; polls > 0; --polls) me.transport->poll(false);
        if (test_message.times_done == 0) {
          cancel_message(me, test_message);
          cancelled.push_back(&test_message);
        }
      }
      synchronize(me, bootstrap, 3 * number + 1);
      for (const TestMessage* test_message : cancelled) expect_left_alone(*test_message);
      TestMessage* next = nullptr;  // another message in the same direction
      if (peer < bootstrap.size())
        next = sends ? &me.send(peer, tag_number(5000 + number), bytes)
                     : &me.receive(peer, tag_number(5000 + number), bytes);
      if (next != nullptr) {
        expect(me.until([&] { return next->times_done == 1; }), "the message after a cancelled one did not arrive");
        if (!sends) expect(Rank::problem(*next).empty(), Rank::problem(*next));
      }
      synchronize(me, bootstrap, 3 * number + 2);
      for (const TestMessage* test_message : cancelled) expect_left_alone(*test_message);
    }
}

/// Many more short messages than fit into buffers, to a rank that polls late.
void flood(Rank& me, Bootstrap& bootstrap) {
  constexpr std::uint32_t kMany = 5000;
  std::vector<const TestMessage*> received;
  if (me.rank != 0)
    for (std::uint32_t i = 0; i < kMany; ++i) me.send(0, tag_number(i), i % 3000);
  if (me.rank == 0) {
    std::this_thread::sleep_for(200ms);
    for (std::uint32_t i = kMany; i-- > 0;)
      for (int peer = 1; peer < bootstrap.size(); ++peer) {
        received.push_back(&me.receive(peer, tag_number(i), i % 3000));
        if (i % 16 == 0) me.transport->poll(false);
      }
  }
  expect(me.until([&] { return me.finished == me.test_messages.size(); }, 60s), "the flood did not pass");
  for (const TestMessage* test_message : received)
    expect(Rank::problem(*test_message).empty(), Rank::problem(*test_message));
  synchronize(me, bootstrap, 1);
}

/// The last rank's connections break while its process lives, and the others are told by the transport alone.
void lost(Rank& me, Bootstrap& bootstrap) {
  synchronize(me, bootstrap, 1);
  if (me.rank == bootstrap.size() - 1) {
    me.transport->close(true);
    std::this_thread::sleep_for(1s);  // a launcher ends the others once a rank has failed, not when one has ended
    return;
  }
  me.receive(bootstrap.size() - 1, tag_number(1), 100'000);
  expect(me.until([&] { return !me.lost.empty(); }, 10s), "a broken connection was not reported");
  expect(me.lost.rfind(std::to_string(bootstrap.size() - 1) + ": ", 0) == 0, "the wrong rank: " + me.lost);
  std::this_thread::sleep_for(1s);  // a rank that ended now would be the first that a slower one loses
  me.transport->close(true);
}

const std::map<std::string, void (*)(Rank&, Bootstrap&)>& modes() {
  static const std::map<std::string, void (*)(Rank&, Bootstrap&)> kAll = {
      {"messages", messages}, {"lengths", lengths}, {"cancel", cancel}, {"flood", flood}, {"lost", lost}};
  return kAll;
}

}  // namespace

int run_transport_ranks(const std::string& mode, const MakeTransport& make_transport) {
  try {
    const Launch launch = resolve_launch();
    const std::shared_ptr<Bootstrap> bootstrap = rendezvous({.launch = launch, .timeout = 30s});
    Rank me(launch.rank);
    me.transport = make_transport(*bootstrap, me);
    modes().at(mode)(me, *bootstrap);
    if (mode == "lost") return 0;
    synchronize(me, *bootstrap, 1'000'000);
    expect(me.lost.empty() && me.failure.empty(), me.lost + me.failure);
    me.transport->close(false);
    if (me.rank == 0) std::printf("%s: all right\n", mode.c_str());
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", mode.c_str(), error.what());
    return 1;
  }
}

}  // namespace tessera::link_test
