// How ranks of a communicator make another one: what its members agree on, and the exchanges that this takes.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/comm/failure.h"

namespace tessera::comm {

/// The arguments of one member.
struct SplitRequest {
  int color = 0;
  int key = 0;
};

/// The new communicator of one member.
struct GroupPlan {
  int rank = 0;              ///< in the new communicator
  std::vector<int> members;  ///< their ranks in the parent; empty: no communicator, since the color is negative
  int tag = 0;               ///< of the messages between the members: beyond those of the program
  std::chrono::milliseconds timeout{};  ///< of each exchange
  std::string_view label = "split";

  /// The members as ranks of the world of `parent`.
  template <class Group>
  std::vector<int> world_ranks(const Group& parent) const {
    std::vector<int> ranks;
    for (const int member : members) ranks.push_back(parent.world_rank(member));
    return ranks;
  }
};

/// Members of equal color, ordered by key, then by rank. `requests` by rank of the parent.
TESSERA_API GroupPlan plan_split(std::span<const SplitRequest> requests, int rank, std::chrono::milliseconds timeout);
/// For valid arguments of create_group(). `rank` in the parent.
TESSERA_API GroupPlan plan_group(std::span<const int> members, const OpOptions& options, int rank);
/// Equal for equal lists of members.
TESSERA_API std::uint64_t fingerprint(std::span<const int> members);
/// What differing lists are reported as.
Failure differing_members(const GroupPlan& plan, const std::string& rank_name);

/// Gathers a value of every rank of `group`, without counting traffic. T has the same size on all members.
template <class Group, class T>
std::vector<T> gather_for_split(Group& group, const T& mine) {
  std::vector<T> all(static_cast<std::size_t>(group.size()));
  const OpDesc call{.kind = OpKind::all_gather,
                    .in = {&mine, sizeof(T), DType::u8, {}},
                    .out = {all.data(), sizeof(T) * all.size(), DType::u8, {}},
                    .timeout = group.timeout(),
                    .label = "split"};
  group.launch(group.prepare(call, true)).wait();
  return all;
}

/// Gathers a value of every member of `plan`, in their order, by messages over `parent`, without counting traffic. The
/// other ranks of the parent take no part, and its operations are not delayed.
template <class Group, class T>
std::vector<T> gather_from_members(Group& parent, const GroupPlan& plan, const T& mine) {
  struct Entry {
    std::uint64_t members;
    T value;
  };
  const std::size_t size = plan.members.size();
  const auto own = static_cast<std::size_t>(plan.rank);
  const Buffer memory = parent.allocate_scratch(sizeof(Entry) * size);
  Entry* const entries = new (memory.data()) Entry[size]{};
  entries[own] = {fingerprint(plan.members), mine};
  std::vector<OpDesc> parts;
  for (std::size_t k = 0; k < size; ++k) {
    if (k == own) continue;
    const OpDesc part{.root = plan.members[k], .timeout = plan.timeout, .label = plan.label, .tag = plan.tag};
    parts.push_back(part);
    parts.back().kind = OpKind::send;
    parts.back().in = {&entries[own], sizeof(Entry), DType::u8, {}};
    parts.push_back(part);
    parts.back().kind = OpKind::recv;
    parts.back().out = {&entries[k], sizeof(Entry), DType::u8, {}};
  }
  if (!parts.empty()) parent.start_batch(parts, true).wait();
  std::vector<T> all;
  for (std::size_t k = 0; k < size; ++k) {
    if (entries[k].members != entries[own].members)
      parent.fail_call(differing_members(plan, parent.rank_name(plan.members[k])));
    all.push_back(entries[k].value);
  }
  return all;
}

/// The numbers of a rank's communicators in messages. Thread-safe.
class CommunicatorIds {
 public:
  explicit CommunicatorIds(std::uint32_t limit) : used_(limit) {}
  /// The first unused number from `from` on. Throws Unsupported if there is none.
  std::uint32_t propose(std::uint32_t from) const;
  /// False: meanwhile in use.
  bool reserve(std::uint32_t id);
  void release(std::uint32_t id);

 private:
  mutable std::mutex mutex_;
  std::vector<bool> used_;
};

}  // namespace tessera::comm
