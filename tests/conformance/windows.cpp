// One-sided operations.
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/window.h"
#include "tests/conformance/cases.h"

namespace tessera::conformance {
namespace {

using comm::Window;
using Values = std::vector<std::int64_t>;

constexpr std::size_t kCounts[] = {1, 5, 6, 3000, 300'000};  // within a message, eager, and by a rendezvous

View view(Values& values) { return view_of(values.data(), values.size()); }

Values filled(std::size_t count, std::int64_t value) { return Values(count, value); }

/// What each rank has at the place of each other one: what that one put there.
std::string puts(Communicator& world) {
  const auto n = static_cast<std::size_t>(world.size()), me = static_cast<std::size_t>(world.rank());
  for (const std::size_t count : kCounts) {
    Values memory = filled(n * count, -1);
    {
      Window window(world, view(memory));
      for (int round = 0; round < 3; ++round) {
        Values mine = filled(count, static_cast<std::int64_t>(me) * 10 + round);
        std::vector<Work> works;
        for (int peer = 0; peer < world.size(); ++peer) {
          works.push_back(window.put(view(mine), peer, me * count * sizeof(std::int64_t)));
          works.push_back(window.signal(peer));
        }
        for (int peer = 0; peer < world.size(); ++peer) window.wait_signal(peer);
        for (std::size_t peer = 0; peer < n; ++peer)
          for (std::size_t i = 0; i < count; ++i)
            if (memory[peer * count + i] != static_cast<std::int64_t>(peer) * 10 + round)
              return "after its signal, rank " + std::to_string(peer) + "'s put of " + std::to_string(count) +
                     " elements is not here in round " + std::to_string(round);
        works.clear();
        world.barrier().wait();  // before the next round overwrites it
      }
      window.close();
    }
  }
  return {};
}

/// Rank 0 sleeps outside the library, and the others read what it has.
std::string gets(Communicator& world) {
  for (const std::size_t count : kCounts) {
    Values memory(count);
    for (std::size_t i = 0; i < count; ++i) memory[i] = world.rank() * 1'000'000 + static_cast<std::int64_t>(i);
    Window window(world, view(memory));
    world.barrier().wait();
    const auto begin = std::chrono::steady_clock::now();
    if (world.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    for (int peer = 0; peer < world.size() && world.rank() != 0; ++peer) {
      Values some(count - count / 2);
      window.get(view(some), peer, count / 2 * sizeof(std::int64_t)).wait();
      for (std::size_t i = 0; i < some.size(); ++i)
        if (some[i] != peer * 1'000'000 + static_cast<std::int64_t>(count / 2 + i))
          return "element " + std::to_string(count / 2 + i) + " of rank " + std::to_string(peer) + " is wrong";
    }
    const auto took = std::chrono::steady_clock::now() - begin;
    window.close();
    double fastest = world.rank() == 0 ? 1e9 : std::chrono::duration<double>(took).count();
    world.all_reduce(view_of(&fastest, 1), view_of(&fastest, 1), ReduceOp::min()).wait();
    if (fastest > 0.3 && count < 1000) return "a rank that sleeps outside the library served no get";
  }
  return {};
}

/// Many puts to the same rank, of several sizes and in one go: a signal comes after the largest, too.
std::string signals(Communicator& world) {
  if (world.rank() > 1) {
    Values none;
    Window window(world, view(none));
    window.close();
    return {};
  }
  constexpr std::size_t kMost = 200'000;
  constexpr int kMany = 50;
  Values memory = filled(kMost, 0);
  Window window(world, view(memory));
  const int peer = 1 - world.rank();
  Values large(kMost), one(1);
  std::vector<Work> works;
  for (int i = 1; i <= kMany; ++i) {
    large.assign(kMost, i);
    one[0] = -i;
    Work put = window.put(view(large), peer, 0);
    put.wait();
    works.push_back(window.put(view(one), peer, 8));
    works.push_back(window.signal(peer));
    window.wait_signal(peer);
    if (memory[kMost - 1] != i || memory[1] != -i) return "put " + std::to_string(i) + " came after its signal";
    works.push_back(window.signal(peer));  // "I have read it"
    window.wait_signal(peer);
  }
  for (int i = 0; i < kMany; ++i) works.push_back(window.signal(peer));
  window.wait_signal(peer, kMany);
  if (window.signals(peer) != 0) return "signals were left";
  works.clear();
  try {
    window.wait_signal(peer, 2, {.timeout = std::chrono::milliseconds(30)});
    return "a signal that nobody sent was waited for";
  } catch (const Timeout& error) {
    const std::string said = error.what();
    if (said.find("0 of 2 signals of rank " + std::to_string(peer)) == std::string::npos)
      return "another error: " + said;
  }
  window.close();
  return {};
}

/// Parts of other sizes, and what lies outside them.
std::string bounds(Communicator& world) {
  Values memory = filled(static_cast<std::size_t>(world.rank()), 0);
  Window window(world, view(memory));
  Values two(2);
  const auto refused = [&](const auto& call, const std::string& says) {
    try {
      call();
      return "accepted: " + says;
    } catch (const InvalidUsage& error) {
      return std::string(error.what()).find(says) == std::string::npos ? "another error: " + std::string(error.what())
                                                                       : std::string();
    }
  };
  std::string wrong;
  const auto note = [&](const std::string& one) { wrong += wrong.empty() ? one : ""; };
  note(refused([&] { window.put(view(two), 0, 0); }, "put: 16 bytes at 0 of rank 0's part of the window, which has 0"));
  note(refused([&] { window.get(view(two), 1, 0); }, "get: 16 bytes at 0 of rank 1's part of the window, which has 8"));
  note(refused([&] { window.put(view(two), 0, SIZE_MAX); }, "put: 16 bytes at"));
  note(refused([&] { window.signal(world.size()); }, "signal: rank " + std::to_string(world.size())));
  note(refused([&] { window.wait_signal(-1); }, "wait_signal: rank -1"));
  window.close();
  note(refused([&] { window.signal(0); }, "signal: the window is closed"));
  return wrong;
}

/// Of a backend whose messages have no tags.
template <std::string (*run)(Communicator&)>
std::string if_supported(Communicator& world) {
  if (Window::supported(world)) return run(world);
  try {
    Window window(world, View{});
  } catch (const Unsupported&) {
    return {};
  }
  return "a window without tags was opened";
}

}  // namespace

std::vector<Behaviour> window_behaviours() {
  return {{"window puts", if_supported<puts>, 1},
          {"window gets", if_supported<gets>, 2},
          {"window signals", if_supported<signals>, 2},
          {"window bounds", if_supported<bounds>, 2}};
}

}  // namespace tessera::conformance
