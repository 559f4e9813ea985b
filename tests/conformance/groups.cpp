// Communicators that their members make without the others.
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/error.h"
#include "tests/conformance/cases.h"

namespace tessera::conformance {
namespace {

using Values = std::vector<std::int64_t>;

View view(Values& values) { return view_of(values.data(), values.size()); }

/// "" if a sum over the group is that of its members' ranks in the parent.
std::string sum_over(Communicator& group, int own, const std::vector<int>& members) {
  if (group.size() != static_cast<int>(members.size())) return "the group has another size";
  if (members[static_cast<std::size_t>(group.rank())] != own) return "the list does not order the ranks";
  Values values(1000, own);
  group.all_reduce(view(values), view(values), ReduceOp::sum()).wait();
  std::int64_t sum = 0;
  for (const int member : members) sum += member;
  return values == Values(1000, sum) ? "" : "the sum over the group is wrong";
}

/// The last rank makes no group: it only waits for a message that rank 0 sends after making some.
std::string without_the_others(Communicator& world) {
  const int last = world.size() - 1;
  Values message(1000, world.rank());
  if (world.rank() == last) {
    world.recv(view(message), 0).wait();
    return message == Values(1000, 0) ? "" : "the message after the groups is wrong";
  }
  std::vector<int> members;  // backwards
  for (int r = last - 1; r >= 0; --r) members.push_back(r);
  const TrafficStats before = world.traffic();
  for (int round = 0; round < 3; ++round) {
    const auto group = world.create_group(members);
    if (std::string error = sum_over(*group, world.rank(), members); !error.empty()) return error;
    const auto alone = group->create_group(std::vector<int>{group->rank()});
    if (std::string error = sum_over(*alone, world.rank(), {world.rank()}); !error.empty()) return error;
  }
  for (const std::uint64_t bytes : (world.traffic() - before).bytes_to_peer)
    if (bytes != 0) return "making a group counts as traffic of its parent";
  if (world.rank() == 0) world.send(view(message), last).wait();
  return {};
}

/// Messages in flight neither delay the making of a group nor end up in it.
std::string beside_messages(Communicator& world) {
  const int next = (world.rank() + 1) % world.size();
  const int previous = (world.rank() + world.size() - 1) % world.size();
  std::vector<int> members;
  for (int r = 0; r < world.size(); ++r) members.push_back(r);
  for (const std::size_t count : {std::size_t{3}, std::size_t{300'000}}) {
    Values sent(count, world.rank());
    Values received(count, -1);
    Work send = world.send(view(sent), next);
    const auto group = world.create_group(members);
    Work receive = group->recv(view(received), previous);
    group->send(view(sent), next).wait();
    receive.wait();
    if (received != Values(count, previous)) return "a message in the group is wrong";
    received.assign(count, -1);
    world.recv(view(received), previous).wait();
    send.wait();
    if (received != Values(count, previous)) return "a message beside the group is wrong";
  }
  return {};
}

/// As a program with a pipeline stage, a replica and a pair per layer has them: all alive at once.
std::string many(Communicator& world) {
  constexpr int kPairs = 100;
  const int partner = world.rank() ^ 1;
  if (partner >= world.size()) return {};
  const std::vector<int> members = {std::min(world.rank(), partner), std::max(world.rank(), partner)};
  std::vector<std::unique_ptr<Communicator>> groups;
  for (int round = 0; round < 2; ++round) {
    groups.clear();
    for (int i = 0; i < kPairs; ++i) groups.push_back(world.create_group(members));
    for (const auto& group : groups)
      if (std::string error = sum_over(*group, world.rank(), members); !error.empty()) return error;
  }
  return {};
}

/// Threads make groups of the same members at the same time, while this one calls collectives.
std::string from_threads(Communicator& world) {
  constexpr int kThreads = 4;
  std::vector<int> members;
  for (int r = 0; r < world.size(); ++r) members.push_back(r);
  std::vector<std::string> errors(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      try {
        for (int round = 0; round < 5 && errors[t].empty(); ++round) {
          const auto group = world.create_group(members, {.tag = t});
          Values values(10, t);
          group->all_reduce(view(values), view(values), ReduceOp::sum()).wait();
          if (values != Values(10, t * world.size())) errors[t] = "groups of two threads are mixed up";
        }
      } catch (const std::exception& error) {
        errors[t] = error.what();
      }
    });
  std::string wrong;
  for (int i = 0; i < 50; ++i) {
    Values values(100, 1);
    world.all_reduce(view(values), view(values), ReduceOp::sum()).wait();
    if (values != Values(100, world.size())) wrong = "a sum beside the making of groups is wrong";
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors)
    if (!error.empty()) return error;
  return wrong;
}

/// Wrong arguments are refused before anything is sent.
std::string wrong_members(Communicator& world) {
  struct Case {
    std::vector<int> members;
    OpOptions options;
    std::string said;
  };
  const int other = (world.rank() + 1) % world.size();
  const std::vector<Case> cases = {
      {{}, {}, "is not a member"},
      {{other}, {}, "this rank, " + std::to_string(world.rank()) + ", is not a member; only members call it"},
      {{world.rank(), world.size()}, {}, "member is " + std::to_string(world.size()) + ", needs 0 to"},
      {{world.rank(), -1}, {}, "member is -1, needs 0 to"},
      {{world.rank(), other, world.rank()}, {}, "rank " + std::to_string(world.rank()) + " is listed twice"},
      {{world.rank()}, {.tag = kMaxTag + 1}, "tag is 1048576, needs 0 to 1048575"}};
  for (const Case& one : cases) try {
      world.create_group(one.members, one.options);
      return "accepted, instead of: " + one.said;
    } catch (const InvalidUsage& error) {
      if (std::string(error.what()).find(one.said) == std::string::npos)
        return "'" + std::string(error.what()) + "' instead of '" + one.said + "'";
    }
  world.barrier().wait();
  return {};
}

}  // namespace

std::vector<Behaviour> group_behaviours() {
  return {{"groups without the others", without_the_others, 3},
          {"groups beside messages", beside_messages, 2},
          {"many groups", many, 2},
          {"groups of threads", from_threads, 2},
          {"wrong members", wrong_members, 2}};
}

}  // namespace tessera::conformance
