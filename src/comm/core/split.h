// What the members of a communicator agree on when they split it.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// The arguments of one member.
struct SplitRequest {
  int color = 0;
  int key = 0;
  std::uint32_t id = 0;  ///< proposed for the new communicator by backends that number theirs
};

/// The part of a split to which one member belongs.
struct SplitPlan {
  int rank = 0;              ///< in the part
  std::vector<int> members;  ///< their ranks in the parent; empty: no part, since the color is negative
  std::uint32_t id = 0;      ///< the highest proposal of the members

  /// The members as ranks of the world of `parent`.
  template <class Group>
  std::vector<int> world_ranks(const Group& parent) const {
    std::vector<int> ranks;
    for (const int member : members) ranks.push_back(parent.world_rank(member));
    return ranks;
  }
};

/// Members of equal color, ordered by key, then by rank. `requests` by rank of the parent.
SplitPlan plan_split(std::span<const SplitRequest> requests, int rank);

/// Gathers a value of every member, without counting traffic. T has the same size on all members.
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
