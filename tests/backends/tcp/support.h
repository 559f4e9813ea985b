// Worlds of TCP transports in one process, polled by one thread in turns or by one thread per rank.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "backends/tcp/transport.h"
#include "tessera/base/error.h"
#include "tessera/comm/bootstrap/thread_bootstrap.h"

namespace tessera::tcp_test {

using namespace tessera::base;
using namespace tessera::comm;
using namespace std::chrono_literals;
using tessera::comm::tcp::TcpOptions;
using tessera::comm::tcp::TcpTransport;

inline constexpr auto kPatience = 60s;

/// A message and its memory, filled by its tag, so that every byte identifies its position.
struct TestMessage {
  Message message;
  std::vector<std::byte> memory;
  std::size_t came = 0;
  bool done = false;
};

/// Byte `at` of the message `tag`.
inline std::byte pattern(const MessageTag& tag, std::size_t at) {
  std::uint64_t x = (std::uint64_t{tag.operation} << 32 | tag.communicator << 24 | tag.step) * 0x9e3779b97f4a7c15U;
  x ^= (at >> 3) * 0xd6e8feb86659fd93U;
  x ^= x >> 29;
  return static_cast<std::byte>(x >> ((at & 7) * 8));
}

inline void fill(TestMessage& test_message) {
  for (std::size_t i = 0; i < test_message.memory.size(); ++i)
    test_message.memory[i] = pattern(test_message.message.tag, i);
}

/// Whether the first `bytes` bytes are those of the message that this test_message's tag names.
inline bool intact(const TestMessage& test_message, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i)
    if (test_message.memory[i] != pattern(test_message.message.tag, i)) return false;
  return true;
}

struct Node final : MessageOwner, TransportEvents {
  void message_done(Message& message, std::size_t bytes) noexcept override {
    auto& test_message = *reinterpret_cast<TestMessage*>(&message);
    EXPECT_FALSE(test_message.done) << "done twice";
    test_message.done = true;
    test_message.came = bytes;
    ++finished;
  }
  void connection_lost(int peer, const std::string& why) noexcept override {
    lost.push_back(peer);
    reason = why;
  }
  void message_damaged(int peer, const std::string& what, bool authenticated) noexcept override {
    damage = "from " + std::to_string(peer) + ": " + what + (authenticated ? " was changed" : "");
  }
  void transport_failed(const std::string& why) noexcept override { failure = why; }

  std::unique_ptr<TestMessage> test_message(int peer, MessageTag tag, std::size_t bytes) {
    auto made = std::make_unique<TestMessage>();
    made->memory.resize(bytes);
    made->message.data = made->memory.data();
    made->message.bytes = bytes;
    made->message.peer = peer;
    made->message.tag = tag;
    made->message.owner = this;
    return made;
  }
  std::unique_ptr<TestMessage> send(int peer, MessageTag tag, std::size_t bytes) {
    auto made = test_message(peer, tag, bytes);
    fill(*made);
    transport->send(made->message);
    return made;
  }
  std::unique_ptr<TestMessage> receive(int peer, MessageTag tag, std::size_t bytes) {
    auto made = test_message(peer, tag, bytes);
    transport->receive(made->message);
    return made;
  }
  /// Polls, and sleeps without progress, until the condition holds. False: timeout.
  bool until(const std::function<bool()>& reached, std::chrono::milliseconds time = kPatience) {
    const auto end = Clock::now() + time;
    for (std::uint32_t turn = 1; !reached(); ++turn) {
      if (Clock::now() > end) return false;
      if (transport->poll(turn % 16 == 0)) continue;
      if (transport->waiter().arm()) transport->waiter().sleep(1ms);
    }
    return true;
  }

  int rank = 0;
  std::unique_ptr<TcpTransport> transport;
  std::size_t finished = 0;
  std::vector<int> lost;
  std::string reason, failure, damage;
};
static_assert(std::is_standard_layout_v<Message>);

using World = std::vector<std::unique_ptr<Node>>;

inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return std::string(error.kind()) + ": " + error.what();
  }
  return "";
}

struct WorldPlan {
  int ranks = 2;
  TcpOptions settings = {};
  std::chrono::milliseconds timeout = 20s;
  /// Wraps the bootstrap of a rank, for tests that manipulate it.
  std::function<std::shared_ptr<Bootstrap>(std::shared_ptr<Bootstrap>)> wrap = {};
  std::function<void(int rank, TcpOptions&)> change = {};
  std::shared_ptr<const TlsContext> tls = nullptr;
};

/// Returns the error of each rank; "" if it was created.
inline std::vector<std::string> try_to_make(const WorldPlan& plan, World& world) {
  world.clear();
  const auto bootstraps = make_thread_bootstraps(plan.ranks, plan.timeout);
  std::vector<std::string> errors(bootstraps.size());
  std::vector<std::thread> threads;
  while (world.size() < bootstraps.size()) world.push_back(std::make_unique<Node>());
  for (std::size_t r = 0; r < bootstraps.size(); ++r)
    threads.emplace_back([&, r] {
      std::shared_ptr<Bootstrap> bootstrap = bootstraps[r];
      if (plan.wrap) bootstrap = plan.wrap(bootstrap);
      TcpOptions settings = plan.settings;
      if (plan.change) plan.change(static_cast<int>(r), settings);
      BackendOptions options;
      options.communicator.timeout = plan.timeout;
      options.tls = plan.tls;
      world[r]->rank = static_cast<int>(r);
      errors[r] = error_of([&] { world[r]->transport = make_transport(*bootstrap, *world[r], options, settings); });
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline World make_world(const WorldPlan& plan) {
  World world;
  for (const std::string& error : try_to_make(plan, world))
    if (!error.empty()) throw SystemError(error);
  return world;
}
inline World make_world(int ranks, int streams) {
  WorldPlan plan;
  plan.ranks = ranks;
  plan.settings.streams = streams;
  return make_world(plan);
}

/// One thread polls all ranks in turns until the condition holds. False: timeout.
inline bool poll_until(const World& world, const std::function<bool()>& reached,
                       std::chrono::milliseconds time = kPatience) {
  const auto end = Clock::now() + time;
  for (std::uint32_t turn = 1; !reached(); ++turn) {
    if (Clock::now() > end) return false;
    for (const auto& node : world)
      if (node->transport != nullptr) node->transport->poll(turn % 16 == 0);
  }
  return true;
}

/// Polls until there is no progress for a while.
inline void poll_until_quiet(const World& world, std::chrono::milliseconds quiet = 20ms) {
  auto last = Clock::now();
  for (std::uint32_t turn = 1; Clock::now() - last < quiet; ++turn)
    for (const auto& node : world)
      if (node->transport != nullptr && node->transport->poll(turn % 16 == 0)) last = Clock::now();
}

inline void on_threads(const World& world, const std::function<void(Node&)>& body) {
  std::vector<std::thread> threads;
  for (const auto& node : world) threads.emplace_back([&] { body(*node); });
  for (std::thread& thread : threads) thread.join();
}

inline void close(const World& world) {
  on_threads(world, [](Node& node) { node.transport->close(false); });
}

}  // namespace tessera::tcp_test
