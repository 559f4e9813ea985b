// Behavior with more than one operation in flight, beside the results of single calls.
#include <algorithm>
#include <array>
#include <chrono>
#include <future>
#include <numeric>
#include <semaphore>
#include <thread>

#include "tests/conformance/cases.h"

namespace tessera::conformance {
namespace {

using Values = std::vector<std::int64_t>;

View view(Values& values) { return view_of(values.data(), values.size()); }

std::string unequal(std::string_view what, const Values& have, const Values& want) {
  if (have == want) return {};
  const auto at = std::mismatch(have.begin(), have.end(), want.begin()).first - have.begin();
  return std::string(what) + ": element " + std::to_string(at) + " is " +
         std::to_string(have[static_cast<std::size_t>(at)]) + " instead of " +
         std::to_string(want[static_cast<std::size_t>(at)]);
}

Values filled(std::size_t count, std::int64_t value) { return Values(count, value); }

std::int64_t ranks_sum(const Communicator& comm) {
  return static_cast<std::int64_t>(comm.size()) * (comm.size() - 1) / 2;
}

/// Two communicators of the same ranks, used in the opposite order on odd ranks.
std::string opposite_order(Communicator& world) {
  const auto a = world.split(0, world.rank());
  const auto b = world.split(0, world.rank());
  for (const std::size_t count : {std::size_t{5}, std::size_t{100'000}}) {
    Values in_a = filled(count, world.rank());
    Values in_b = filled(count, 2 * world.rank());
    Values out_a(count);
    Values out_b(count);
    const auto call_a = [&] { return a->all_reduce(view(in_a), view(out_a), ReduceOp::sum()); };
    const auto call_b = [&] { return b->all_reduce(view(in_b), view(out_b), ReduceOp::sum()); };
    {
      Work first = world.rank() % 2 == 0 ? call_a() : call_b();
      Work second = world.rank() % 2 == 0 ? call_b() : call_a();
      first.wait();
      second.wait();
    }
    if (auto wrong = unequal("first communicator", out_a, filled(count, ranks_sum(world))); !wrong.empty())
      return wrong;
    if (auto wrong = unequal("second communicator", out_b, filled(count, 2 * ranks_sum(world))); !wrong.empty())
      return wrong;
  }
  return {};
}

/// How long this rank needs for an all_reduce whose part rank 0 issues before it sleeps outside the library.
std::chrono::milliseconds time_beside_sleeper(Communicator& world, std::size_t count, std::chrono::milliseconds sleep,
                                              std::string& wrong) {
  Values in = filled(count, world.rank());
  Values out(count);
  world.barrier().wait();
  const auto begin = std::chrono::steady_clock::now();
  Work work = world.all_reduce(view(in), view(out), ReduceOp::sum());
  if (world.rank() == 0) std::this_thread::sleep_for(sleep);
  work.wait();
  const auto took = std::chrono::steady_clock::now() - begin;
  wrong = unequal("sum", out, filled(count, ranks_sum(world)));
  return std::chrono::duration_cast<std::chrono::milliseconds>(took);
}

/// Rank 0 issues its part and sleeps outside the library: no rank waits until it returns. On a busy host a rank may
/// need as long as a short sleep; one that waits for rank 0 needs as long as any.
std::string waiter_delays_no_rank(Communicator& world) {
#ifdef __SANITIZE_THREAD__
  constexpr std::size_t kMany = 100'000;  // more take as long as the sleep under this sanitizer
#else
  constexpr std::size_t kMany = 1'000'000;
#endif
  for (const std::size_t count : {std::size_t{100}, kMany})
    for (const int attempt : {1, 2, 3}) {
      const std::chrono::milliseconds sleep(attempt == 1 ? 600 : 3000 * (attempt - 1));
      std::string wrong;
      const std::chrono::milliseconds took = time_beside_sleeper(world, count, sleep, wrong);
      if (!wrong.empty()) return wrong;
      std::int32_t waited = world.rank() != 0 && took > sleep * 5 / 6 ? 1 : 0;
      const bool own = waited != 0;
      world.all_reduce(comm::view_of(&waited, 1), comm::view_of(&waited, 1), ReduceOp::max()).wait();
      if (waited == 0) break;
      if (attempt == 3 && own)
        return "rank " + std::to_string(world.rank()) + " waited " + std::to_string(took.count()) +
               " ms for a rank that slept outside the library for " + std::to_string(sleep.count()) + " ms";
    }
  return {};
}

/// Operations in flight at once, waited for in reverse order.
std::string waited_out_of_order(Communicator& world) {
  constexpr std::size_t kOps = 8;
  const auto n = static_cast<std::size_t>(world.size());
  std::vector<Values> in;
  std::vector<Values> out;
  for (std::size_t i = 0; i < kOps; ++i) {
    const std::size_t count = 1 + i * i * 3000;
    in.push_back(filled(count, world.rank() + static_cast<std::int64_t>(i)));
    out.emplace_back(count * n);
  }
  {
    std::vector<Work> works;
    for (std::size_t i = 0; i < kOps; ++i) works.push_back(world.all_gather(view(in[i]), view(out[i])));
    for (std::size_t i = kOps; i-- > 0;) works[i].wait();
  }
  for (std::size_t i = 0; i < kOps; ++i)
    for (std::size_t r = 0; r < n; ++r)
      for (const std::size_t at : {r * in[i].size(), (r + 1) * in[i].size() - 1})
        if (out[i][at] != static_cast<std::int64_t>(r + i)) return "operation " + std::to_string(i) + " is wrong";
  return {};
}

/// The same seeded sequence of operations on two groups (even and odd ranks) and on the world, all at once.
std::string random_sequences(Communicator& world) {
  const auto group = world.split(world.rank() % 2, world.rank());
  std::uint64_t seed = 99;
  for (int i = 0; i < 60; ++i) {
    seed = scramble(seed + 1);
    Communicator& comm = seed % 3 == 0 ? world : *group;
    const std::size_t count = seed / 3 % 20'000;
    const int root = static_cast<int>(seed / 7 % static_cast<std::uint64_t>(comm.size()));
    Values in = filled(count, comm.rank() + 1);
    Values out(count);
    const std::int64_t sum = ranks_sum(comm) + comm.size();
    std::string wrong;
    switch (seed / 11 % 3) {
      case 0:
        comm.all_reduce(view(in), view(out), ReduceOp::sum()).wait();
        wrong = unequal("all_reduce", out, filled(count, sum));
        break;
      case 1:
        comm.broadcast(view(in), view(out), root).wait();
        wrong = unequal("broadcast", out, filled(count, root + 1));
        break;
      default:
        comm.reduce(view(in), view(out), ReduceOp::max(), root).wait();
        if (comm.rank() == root) wrong = unequal("reduce", out, filled(count, comm.size()));
    }
    if (!wrong.empty()) return "operation " + std::to_string(i) + ": " + wrong;
  }
  return {};
}

/// Sends and receives around a ring, in one batch; messages between two ranks keep their order.
std::string messages(Communicator& world) {
  const int next = (world.rank() + 1) % world.size();
  const int previous = (world.rank() + world.size() - 1) % world.size();
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{300'000}}) {
    Values first = filled(count, world.rank());
    Values second = filled(count, world.rank() + 1000);
    Values got_first(count);
    Values got_second(count);
    const std::vector<P2POp> parts = {P2POp::send(view(first), next), P2POp::recv(view(got_first), previous),
                                      P2POp::send(view(second), next), P2POp::recv(view(got_second), previous)};
    world.batch(parts).wait();
    if (auto wrong = unequal("first message", got_first, filled(count, previous)); !wrong.empty()) return wrong;
    if (auto wrong = unequal("second message", got_second, filled(count, previous + 1000)); !wrong.empty())
      return wrong;
  }
  return {};
}

struct Issued {
  Values in, out, want;
  Work work;
};

/// Operations that one thread issues and another one waits for, meanwhile.
std::string waited_in_another_thread(Communicator& world) {
  constexpr std::size_t kCalls = 150;
  const int next = (world.rank() + 1) % world.size();
  const int previous = (world.rank() + world.size() - 1) % world.size();
  std::vector<Issued> calls(kCalls);
  for (std::size_t i = 0; i < kCalls; ++i) {
    const std::size_t count = i % 2 == 0 ? 1 + i : i * 97 % 20'000;
    const auto of_call = static_cast<std::int64_t>(i);
    calls[i].in = filled(count, world.rank() + of_call);
    calls[i].out = filled(count, -1);
    calls[i].want = filled(count, i % 3 == 2 ? previous + of_call : ranks_sum(world) + of_call * world.size());
  }
  std::counting_semaphore<2 * kCalls> issued(0);
  std::future<std::string> waiter = std::async(std::launch::async, [&]() -> std::string {
    for (std::size_t i = 0; i < kCalls; ++i) {
      issued.acquire();
      calls[i].work.wait();
      if (auto wrong = unequal("call " + std::to_string(i), calls[i].out, calls[i].want); !wrong.empty()) return wrong;
    }
    return {};
  });
  try {
    for (std::size_t i = 0; i < kCalls; ++i) {
      Issued& call = calls[i];
      if (i % 3 == 2) {
        const std::array<P2POp, 2> parts = {P2POp::send(view(call.in), next), P2POp::recv(view(call.out), previous)};
        call.work = world.batch(parts);
      } else {
        call.work = world.all_reduce(view(call.in), view(call.out), ReduceOp::sum());
      }
      issued.release();
    }
  } catch (...) {
    issued.release(kCalls);  // the waiter must not wait for calls that were not made
    throw;
  }
  return waiter.get();
}

/// Parts of different lengths, some empty.
std::string ragged_parts(Communicator& world) {
  const auto n = static_cast<std::size_t>(world.size());
  const auto me = static_cast<std::size_t>(world.rank());
  std::vector<std::size_t> counts(n);
  for (std::size_t r = 0; r < n; ++r) counts[r] = (r + 2) % 3 * 1777;
  const std::size_t total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  Values want;
  for (std::size_t r = 0; r < n; ++r) want.insert(want.end(), counts[r], static_cast<std::int64_t>(r));
  Values in = filled(counts[me], world.rank());
  Values gathered(total, -1);
  world.all_gather_v(view(in), view(gathered), counts).wait();
  if (auto wrong = unequal("all_gather_v", gathered, want); !wrong.empty()) return wrong;
  Values whole = want;
  Values part(counts[me], -1);
  world.reduce_scatter_v(view(whole), view(part), counts, ReduceOp::sum()).wait();
  if (auto wrong = unequal("reduce_scatter_v", part, filled(counts[me], world.rank() * world.size())); !wrong.empty())
    return wrong;
  const int root = world.size() - 1;
  Values collected(total, -1);
  world.gather_v(view(in), view(collected), counts, root).wait();
  if (world.rank() == root)
    if (auto wrong = unequal("gather_v", collected, want); !wrong.empty()) return wrong;
  Values scattered(counts[me], -1);
  world.scatter_v(view(want), view(scattered), counts, root).wait();
  if (auto wrong = unequal("scatter_v", scattered, in); !wrong.empty()) return wrong;
  // Rank a sends counts[b] + a elements to rank b.
  std::vector<std::size_t> to(n);
  std::vector<std::size_t> from(n);
  Values sent;
  Values expected;
  for (std::size_t r = 0; r < n; ++r) {
    to[r] = counts[r] + me;
    from[r] = counts[me] + r;
    sent.insert(sent.end(), to[r], static_cast<std::int64_t>(me * 100 + r));
    expected.insert(expected.end(), from[r], static_cast<std::int64_t>(r * 100 + me));
  }
  Values received(expected.size(), -1);
  world.all_to_all_v(view(sent), to, view(received), from).wait();
  return unequal("all_to_all_v", received, expected);
}

/// Traffic statistics count sent bytes by operation and by peer.
std::string traffic_is_counted(Communicator& world) {
  const std::size_t count = 1000 * static_cast<std::size_t>(world.size());
  Values in = filled(count, 1);
  Values out(count / static_cast<std::size_t>(world.size()));
  const TrafficStats before = world.traffic();
  world.reduce_scatter(view(in), view(out), ReduceOp::sum()).wait();
  world.barrier().wait();
  const TrafficStats change = world.traffic() - before;
  const std::uint64_t want = 8000 * static_cast<std::uint64_t>(world.size() - 1);
  const std::uint64_t have = change.of(OpKind::reduce_scatter).bytes_sent;
  std::uint64_t by_peer = 0;
  for (const std::uint64_t bytes : change.bytes_to_peer) by_peer += bytes;
  if (have != want) return "reduce_scatter sent " + std::to_string(have) + " bytes, not " + std::to_string(want);
  if (by_peer < want) return "by peer only " + std::to_string(by_peer) + " bytes are counted";
  return {};
}

/// Splitting, dropping and splitting again; memory of one communicator used by another.
std::string split_and_memory(Communicator& world) {
  for (int round = 0; round < 5; ++round) {
    const auto pair = world.split(world.rank() / 2, -world.rank());
    const auto none = world.split(-1, 0);
    if (none != nullptr) return "a negative color got a communicator";
    if (pair->rank() != (pair->size() == 2 ? 1 - world.rank() % 2 : 0)) return "the key does not order the ranks";
    const Buffer memory = world.allocate(80'000, MemoryKind::host, MemoryCategory::other);
    auto* values = static_cast<std::int64_t*>(memory.data());
    std::fill_n(values, 10'000, world.rank());
    pair->all_reduce(view_of(values + 1, 9'000), view_of(values + 1, 9'000), ReduceOp::max()).wait();
    const int partner = world.rank() % 2 == 0 ? std::min(world.rank() + 1, world.size() - 1) : world.rank();
    if (values[0] != world.rank() || values[1] != partner || values[9'000] != partner || values[9'001] != world.rank())
      return "memory at an offset went wrong";
  }
  return {};
}

}  // namespace

std::vector<Behaviour> behaviours() {
  std::vector<Behaviour> all = {{"opposite order", opposite_order, 1},
                                {"a waiter delays no rank", waiter_delays_no_rank, 2},
                                {"waited out of order", waited_out_of_order, 1},
                                {"waited in another thread", waited_in_another_thread, 2},
                                {"random sequences on split groups", random_sequences, 2},
                                {"messages", messages, 2},
                                {"parts of different lengths", ragged_parts, 1},
                                {"traffic is counted", traffic_is_counted, 1},
                                {"split and memory", split_and_memory, 1}};
  for (const Behaviour& behaviour : callback_behaviours()) all.push_back(behaviour);
  for (const Behaviour& behaviour : tag_behaviours()) all.push_back(behaviour);
  for (const Behaviour& behaviour : group_behaviours()) all.push_back(behaviour);
  for (const Behaviour& behaviour : window_behaviours()) all.push_back(behaviour);
  return all;
}

}  // namespace tessera::conformance
