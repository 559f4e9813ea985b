// Messages whose every byte identifies its position, and a rank that sends, receives and polls them over any transport.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/transport.h"

namespace tessera::link_test {

using namespace tessera::comm;

inline std::uint64_t scramble(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

struct TestMessage {
  Message message;
  std::vector<std::byte> memory;
  std::size_t came = 0;
  int times_done = 0;
};

inline std::byte pattern(int sender, const MessageTag& tag, std::size_t at) {
  const std::uint64_t place = std::uint64_t{tag.operation} << 40 ^ std::uint64_t{tag.communicator} << 28 ^
                              std::uint64_t{tag.step} << 8 ^ static_cast<std::uint64_t>(sender);
  return static_cast<std::byte>(scramble(place * 0x9e3779b97f4a7c15u + at / 8) >> at % 8 * 8);
}

inline constexpr std::byte kUntouched{0xa5};

struct Rank final : MessageOwner, TransportEvents {
  explicit Rank(int number) : rank(number) {}

  void message_done(Message& message, std::size_t bytes) noexcept override {
    TestMessage& test_message = *test_messages[message.index];
    ++test_message.times_done;
    test_message.came = bytes;
    ++finished;
  }
  void connection_lost(int peer, const std::string& why) noexcept override {
    lost += std::to_string(peer) + ": " + why;
  }
  void message_damaged(int, const std::string& what, bool) noexcept override { failure += what; }
  void transport_failed(const std::string& why) noexcept override { failure += why; }

  TestMessage& test_message(int peer, const MessageTag& tag, std::size_t bytes) {
    test_messages.push_back(std::make_unique<TestMessage>());
    TestMessage& made = *test_messages.back();
    made.memory.assign(bytes, kUntouched);
    made.message.data = bytes == 0 ? nullptr : made.memory.data();
    made.message.bytes = bytes;
    made.message.peer = peer;
    made.message.tag = tag;
    made.message.owner = this;
    made.message.sent = &sent;
    made.message.index = static_cast<std::uint32_t>(test_messages.size() - 1);
    return made;
  }
  TestMessage& send(int peer, const MessageTag& tag, std::size_t bytes) {
    TestMessage& made = test_message(peer, tag, bytes);
    for (std::size_t i = 0; i < bytes; ++i) made.memory[i] = pattern(rank, tag, i);
    transport->send(made.message);
    return made;
  }
  TestMessage& receive(int peer, const MessageTag& tag, std::size_t bytes) {
    TestMessage& made = test_message(peer, tag, bytes);
    transport->receive(made.message);
    return made;
  }
  /// Returns "" or the defect of a completed receive.
  static std::string problem(const TestMessage& test_message) {
    const Message& m = test_message.message;
    const std::string name = "message " + std::to_string(m.tag.operation) + "/" + std::to_string(m.tag.step) + " of " +
                             std::to_string(m.bytes) + " bytes from rank " + std::to_string(m.peer);
    if (test_message.times_done != 1) return name + " was done " + std::to_string(test_message.times_done) + " times";
    if (test_message.came != m.bytes) return name + ": " + std::to_string(test_message.came) + " bytes came";
    for (std::size_t i = 0; i < m.bytes; ++i)
      if (test_message.memory[i] != pattern(m.peer, m.tag, i))
        return name + ": byte " + std::to_string(i) + " is wrong";
    return "";
  }
  /// Polls, and sleeps without progress. False: timeout.
  bool until(const std::function<bool()>& reached, std::chrono::milliseconds time = std::chrono::seconds(30)) {
    const auto end = Clock::now() + time;
    for (std::uint32_t turn = 1; !reached(); ++turn) {
      if (Clock::now() > end) return false;
      if (transport->poll(turn % 16 == 0)) continue;
      if (transport->waiter().arm()) transport->waiter().sleep(std::chrono::milliseconds(1));
    }
    return true;
  }

  const int rank;
  std::unique_ptr<Transport> transport;
  std::vector<std::unique_ptr<TestMessage>> test_messages;
  std::size_t finished = 0;
  std::atomic<std::uint64_t> sent{0};
  std::string lost, failure;
};

}  // namespace tessera::link_test
