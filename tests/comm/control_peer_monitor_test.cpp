// Queries of other ranks' progress, over a channel whose answers the test chooses.
#include "tessera/comm/core/control_peer_monitor.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <thread>

#include "tessera/comm/transport.h"

namespace tessera::comm_test {
namespace {

using namespace comm;
using namespace std::chrono_literals;

/// Passes what is sent to a function of the test.
class FakeChannel final : public ControlChannel {
 public:
  explicit FakeChannel(std::function<void(std::string_view)> sent) : sent_(std::move(sent)) {}
  void send(int, std::string_view message) noexcept override { sent_(message); }

 private:
  const std::function<void(std::string_view)> sent_;
};

/// Rank 0 of two. The other rank answers query i with the replies `answers[i]`, as (number of the query, value).
class AnsweringBootstrap final : public Bootstrap {
 public:
  using Replies = std::vector<std::pair<std::uint64_t, std::uint64_t>>;
  explicit AnsweringBootstrap(std::vector<Replies> answers) : answers_(std::move(answers)) {}
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 2; }
  bool in_process() const noexcept override { return true; }
  std::vector<std::string> all_gather(std::string_view) override { return {}; }
  std::unique_ptr<ControlChannel> open_channel(std::string_view, ControlEvents events) override {
    events_ = events;
    return std::make_unique<FakeChannel>([this, events](std::string_view query) { answer(query, events); });
  }
  const std::vector<std::string>& hosts() const noexcept override { return hosts_; }
  const Token& token() const noexcept override { return token_; }
  std::string local_address() const override { return ""; }
  void lose_peer() const { events_.lost(1); }

 private:
  void answer(std::string_view query, const ControlEvents& events) {
    const std::uint64_t communicator = parse_message(query)->communicator;
    for (const auto& [number, value] : answers_.at(queries_++))
      events.message(1, format_message({.kind = ControlMessage::Kind::progress_reply,
                                        .communicator = communicator,
                                        .number = number,
                                        .value = value}));
  }
  const std::vector<Replies> answers_;
  std::size_t queries_ = 0;
  ControlEvents events_;
  const Token token_{};
  const std::vector<std::string> hosts_;
};

TEST(ControlPeerMonitor, UsesOnlyAnswersToThisQuery) {
  AnsweringBootstrap bootstrap({{{1, 7}}, {{1, 7}}, {{2, 8}, {3, 9}, {1, 7}}});
  ControlPeerMonitor monitor(bootstrap);
  monitor.open("test", [](const ControlMessage&) {});
  const std::vector<int> ranks = {0, 1};
  const auto answered = [&] { return monitor.query_progress(5, ranks)[1]; };
  EXPECT_EQ(answered(), 7U);
  EXPECT_EQ(answered(), std::nullopt) << "the answer to the first query came again, late";
  EXPECT_EQ(answered(), 9U);
  monitor.close();
}

std::chrono::milliseconds time_of(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
}

TEST(ControlPeerMonitor, DoesNotWaitAgainForASilentRank) {
  AnsweringBootstrap bootstrap({{}, {}, {}, {{4, 9}}, {}, {}});
  ControlPeerMonitor monitor(bootstrap);
  monitor.open("test", [](const ControlMessage&) {});
  const std::vector<int> ranks = {0, 1};
  const auto ask = [&] { EXPECT_EQ(monitor.query_progress(5, ranks)[1], std::nullopt); };
  EXPECT_GE(time_of(ask), 900ms);
  EXPECT_LT(time_of(ask), 500ms) << "of another communicator, whose operation is late too";
  EXPECT_LT(time_of([&] { EXPECT_FALSE(monitor.all_respond()); }), 500ms);
  EXPECT_EQ(monitor.query_progress(5, ranks)[1], 9U);
  EXPECT_GE(time_of(ask), 900ms) << "it has answered meanwhile";
  bootstrap.lose_peer();
  EXPECT_LT(time_of([&] { EXPECT_TRUE(monitor.all_respond()); }), 500ms) << "a rank that is gone is no silent one";
  monitor.close();
}

/// Rank 0 of 4: rank 3 is reached through 1 and 2, of which the test chooses those that reply.
class ChainBootstrap final : public Bootstrap {
 public:
  explicit ChainBootstrap(std::vector<int> replying) : replying_(std::move(replying)) {}
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 4; }
  bool in_process() const noexcept override { return true; }
  std::vector<std::string> all_gather(std::string_view) override { return {}; }
  std::unique_ptr<ControlChannel> open_channel(std::string_view, ControlEvents events) override {
    events_ = events;
    return std::make_unique<FakeChannel>([](std::string_view) {});
  }
  std::vector<int> route(int to) const override {
    std::vector<int> all;
    for (int r = 1; r < to; ++r) all.push_back(r);
    return all;
  }
  const std::vector<std::string>& hosts() const noexcept override { return hosts_; }
  const Token& token() const noexcept override { return token_; }
  std::string local_address() const override { return ""; }
  /// Replies to query or probe `number`.
  void reply(std::uint64_t communicator, std::uint64_t number) const {
    for (const int rank : replying_)
      events_.message(rank, format_message({.kind = ControlMessage::Kind::progress_reply,
                                            .communicator = communicator,
                                            .number = number,
                                            .value = 7}));
  }

 private:
  const std::vector<int> replying_;
  ControlEvents events_;
  const Token token_{};
  const std::vector<std::string> hosts_;
};

TEST(ControlPeerMonitor, NamesTheFirstSilentForwarder) {
  for (const auto& [replying, silent] :
       {std::pair{std::vector{1, 2}, -1}, {std::vector{1}, 2}, {std::vector{2}, 1}, {std::vector<int>{}, 1}}) {
    ChainBootstrap bootstrap(replying);
    ControlPeerMonitor monitor(bootstrap);
    monitor.open("test", [](const ControlMessage&) {});
    std::vector<std::optional<std::uint64_t>> replies(4);
    for (const int rank : replying) replies[static_cast<std::size_t>(rank)] = 7;
    EXPECT_EQ(monitor.silent_forwarder(3, replies), silent);
    EXPECT_EQ(monitor.silent_forwarder(1, replies), -1) << "nothing is between";
    monitor.close();
  }
}

TEST(ControlPeerMonitor, QueriesThoseThatForward) {
  ChainBootstrap bootstrap({1, 2, 3});
  ControlPeerMonitor monitor(bootstrap);
  monitor.open("test", [](const ControlMessage&) {});
  std::thread peers([&] {
    std::this_thread::sleep_for(200ms);
    bootstrap.reply(5, 1);
  });
  const std::vector<int> ranks = {0, 3};
  const auto replies = monitor.query_progress(5, ranks);
  peers.join();
  for (const std::size_t rank : {1, 2, 3}) EXPECT_EQ(replies[rank], 7U) << "rank " << rank;
  monitor.close();
}

TEST(ControlPeerMonitor, ReplyOfAnotherRankIsNoneToAProbe) {
  ChainBootstrap bootstrap({2});
  ControlPeerMonitor monitor(bootstrap);
  monitor.open("test", [](const ControlMessage&) {});
  const std::uint64_t first = monitor.send_probe(1);
  const std::uint64_t second = monitor.send_probe(2);
  bootstrap.reply(kMaxCommunicators, second);
  EXPECT_TRUE(monitor.replied_to_probe(2, second));
  EXPECT_FALSE(monitor.replied_to_probe(1, first)) << "it is stopped";
  monitor.close();
}

}  // namespace
}  // namespace tessera::comm_test
