// A link that delivers at random times and in random order, and can be broken. Used by one thread.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "tessera/comm/link.h"

namespace tessera::comm_test {

using namespace comm;

inline constexpr std::size_t kMaxPayload = 100;  ///< longest payload of an active message

/// Messages in flight between the ranks.
struct Net {
  struct Am {
    int to;
    AmHeader header;
    std::vector<std::byte> payload;
  };
  struct Bulk {
    Message* message;
    int from, to;
    std::uint64_t slot;
  };
  std::mt19937_64 dice{1};
  std::vector<Am> ams;
  std::vector<Bulk> sends, receives;
  std::vector<LinkEvents*> events;
  std::vector<int> closed;  ///< CloseMode by rank; -1: open
  // Faults.
  bool corrupts = false;
  bool stuck = false;                ///< matched bulk transfers never complete
  bool writes_after_cancel = false;  ///< a canceled receive is still written to
};

class NoSleep final : public ProgressWaiter {
 public:
  bool arm() noexcept override { return false; }
  void sleep(std::chrono::nanoseconds) noexcept override {}
  void wake() noexcept override {}
};

class FakeLink final : public Link {
 public:
  FakeLink(Net& net, int rank, LinkEvents& events) : net_(net), rank_(rank) {
    net.events.push_back(&events);
    net.closed.push_back(-1);
  }
  std::size_t longest_payload() const noexcept override { return kMaxPayload; }
  bool can_send_eager() const noexcept override {
    return std::count_if(net_.ams.begin(), net_.ams.end(), [&](const auto& n) { return n.header.from == rank_; }) < 8;
  }
  void send_am(int peer, const AmHeader& header, std::span<const std::byte> payload) noexcept override {
    net_.ams.push_back({peer, header, {payload.begin(), payload.end()}});
    if (net_.corrupts && !payload.empty()) net_.ams.back().payload.back() ^= std::byte{1};
  }
  void send_bulk(Message& message, std::uint64_t slot) noexcept override {
    net_.sends.push_back({&message, rank_, message.peer, slot});
  }
  void receive_bulk(Message& message, std::uint64_t slot) noexcept override {
    net_.receives.push_back({&message, message.peer, rank_, slot});
  }
  CancelResult cancel_bulk(Message& message) noexcept override {
    const auto is_it = [&](const Net::Bulk& b) { return b.message == &message; };
    const auto receive = std::find_if(net_.receives.begin(), net_.receives.end(), is_it);
    if (receive != net_.receives.end()) {
      const Net::Bulk bulk = *receive;
      const bool answered =
          std::any_of(net_.sends.begin(), net_.sends.end(), [&](const Net::Bulk& s) { return joined(s, bulk); });
      if (answered && net_.stuck) return CancelResult::unsafe;
      if (answered && net_.dice() % 2 == 0) {  // the transfer had begun
        move(bulk, &message);
        return CancelResult::completed;
      }
      if (!net_.writes_after_cancel) std::erase_if(net_.receives, is_it);
      return CancelResult::not_started;
    }
    if (net_.stuck) return CancelResult::unsafe;
    const auto send = std::find_if(net_.sends.begin(), net_.sends.end(), is_it);
    const auto taker =
        std::find_if(net_.receives.begin(), net_.receives.end(), [&](const Net::Bulk& r) { return joined(*send, r); });
    if (taker == net_.receives.end()) {
      ADD_FAILURE() << "a bulk send that nobody waits for";
      return CancelResult::unsafe;
    }
    move(Net::Bulk(*taker), &message);
    return CancelResult::completed;
  }
  bool poll(bool) noexcept override {
    if (net_.dice() % 3 == 0) return false;
    if (net_.dice() % 2 == 0) return deliver_am();
    return !net_.stuck && move_bulk();
  }
  ProgressWaiter& waiter() noexcept override { return waiter_; }
  void close(CloseMode how) noexcept override { net_.closed[static_cast<std::size_t>(rank_)] = static_cast<int>(how); }

 private:
  static bool joined(const Net::Bulk& a, const Net::Bulk& b) {
    return a.from == b.from && a.to == b.to && a.slot == b.slot;
  }
  /// Delivers a random active message for this rank: they overtake each other.
  bool deliver_am() {
    std::vector<std::size_t> mine;
    for (std::size_t i = 0; i < net_.ams.size(); ++i)
      if (net_.ams[i].to == rank_) mine.push_back(i);
    if (mine.empty()) return false;
    const auto at = static_cast<std::ptrdiff_t>(mine[net_.dice() % mine.size()]);
    const Net::Am am = net_.ams[static_cast<std::size_t>(at)];
    net_.ams.erase(net_.ams.begin() + at);
    net_.events[static_cast<std::size_t>(rank_)]->on_am(am.header, am.payload);
    return true;
  }
  bool move_bulk() {
    for (const Net::Bulk& receive : net_.receives)
      if (receive.to == rank_ && net_.dice() % 2 == 0 && move(Net::Bulk(receive))) return true;
    return false;
  }
  /// Moves the data for `receive` if it has been sent, and notifies both sides except `untold`.
  bool move(Net::Bulk receive, const Message* untold = nullptr) {
    const auto found =
        std::find_if(net_.sends.begin(), net_.sends.end(), [&](const Net::Bulk& s) { return joined(s, receive); });
    if (found == net_.sends.end()) return false;
    const Net::Bulk send = *found;
    EXPECT_EQ(send.message->bytes, receive.message->bytes);
    std::memcpy(receive.message->data, send.message->data, receive.message->bytes);
    if (net_.corrupts) receive.message->data[0] ^= std::byte{1};
    net_.sends.erase(found);
    std::erase_if(net_.receives, [&](const Net::Bulk& r) { return r.message == receive.message; });
    if (send.message != untold) net_.events[static_cast<std::size_t>(send.from)]->bulk_done(*send.message);
    if (receive.message != untold) net_.events[static_cast<std::size_t>(receive.to)]->bulk_done(*receive.message);
    return true;
  }

  Net& net_;
  const int rank_;
  NoSleep waiter_;
};

}  // namespace tessera::comm_test
