#include "tessera/comm/core/split.h"

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::comm {

SplitPlan plan_split(std::span<const SplitRequest> requests, int rank) {
  const auto request_of = [&](int member) -> const SplitRequest& { return requests[static_cast<std::size_t>(member)]; };
  SplitPlan plan;
  if (request_of(rank).color < 0) return plan;
  for (int member = 0; member < static_cast<int>(requests.size()); ++member) {
    if (request_of(member).color != request_of(rank).color) continue;
    plan.members.push_back(member);
    plan.id = std::max(plan.id, request_of(member).id);
  }
  std::stable_sort(plan.members.begin(), plan.members.end(),
                   [&](int a, int b) { return request_of(a).key < request_of(b).key; });
  const auto own = std::find(plan.members.begin(), plan.members.end(), rank);
  plan.rank = static_cast<int>(own - plan.members.begin());
  return plan;
}

std::uint32_t CommunicatorIds::propose(std::uint32_t from) const {
  const std::lock_guard lock(mutex_);
  const auto limit = static_cast<std::uint32_t>(used_.size());
  for (std::uint32_t i = 0; i < limit; ++i) {
    const std::uint32_t id = (from + i) % limit;
    if (!used_[id]) return id;
  }
  throw Unsupported("split: this rank has " + std::to_string(limit) + " communicators already; close some first");
}

bool CommunicatorIds::reserve(std::uint32_t id) {
  const std::lock_guard lock(mutex_);
  if (used_[id]) return false;
  used_[id] = true;
  return true;
}

void CommunicatorIds::release(std::uint32_t id) {
  const std::lock_guard lock(mutex_);
  used_[id] = false;
}

}  // namespace tessera::comm
