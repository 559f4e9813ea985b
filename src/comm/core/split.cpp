#include "tessera/comm/core/split.h"

#include <algorithm>
#include <string>

#include "tessera/base/checksum.h"
#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

// Tags of messages between the members of a new communicator.
constexpr int kGroupTag = kMaxTag + 1;
constexpr int kSplitTag = 2 * kGroupTag;

}  // namespace

GroupPlan plan_split(std::span<const SplitRequest> requests, int rank, std::chrono::milliseconds timeout) {
  const auto request_of = [&](int member) -> const SplitRequest& { return requests[static_cast<std::size_t>(member)]; };
  GroupPlan plan{.tag = kSplitTag, .timeout = timeout};
  if (request_of(rank).color < 0) return plan;
  for (int member = 0; member < static_cast<int>(requests.size()); ++member)
    if (request_of(member).color == request_of(rank).color) plan.members.push_back(member);
  std::ranges::stable_sort(plan.members, [&](int a, int b) { return request_of(a).key < request_of(b).key; });
  const auto own = std::ranges::find(plan.members, rank);
  plan.rank = static_cast<int>(own - plan.members.begin());
  return plan;
}

GroupPlan plan_group(std::span<const int> members, const OpOptions& options, int rank) {
  const auto own = std::ranges::find(members, rank);
  return {.rank = static_cast<int>(own - members.begin()),
          .members = {members.begin(), members.end()},
          .tag = kGroupTag + options.tag,
          .timeout = *options.timeout,
          .label = options.label};
}

std::uint64_t fingerprint(std::span<const int> members) { return base::checksum(std::as_bytes(members)); }

Failure differing_members(const GroupPlan& plan, const std::string& rank_name) {
  std::string own;
  for (const int member : plan.members) own += (own.empty() ? "" : ", ") + std::to_string(member);
  return {FailureKind::mismatch, std::string(plan.label) + ": " + rank_name +
                                     " listed other members than this rank's " + own + ", or in another order"};
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
