#include "tessera/comm/core/group_core.h"

#include <algorithm>

#include "tessera/base/parse.h"
#include "tessera/comm/core/format.h"

namespace tessera::comm {

GroupCore::GroupCore(std::shared_ptr<const BackendOptions> options, int rank, std::vector<int> members)
    : traffic_(members.size()), options_(std::move(options)), rank_(rank), members_(std::move(members)) {}
GroupCore::~GroupCore() = default;

void GroupCore::keep_forever() {
  static auto* const kept = new std::vector<std::shared_ptr<GroupCore>>;  // reachable, so no leak
  kept->push_back(shared_from_this());
}

void GroupCore::set_members(int rank, std::vector<int> members) {
  rank_ = rank;
  members_ = std::move(members);
  traffic_ = TrafficCounters(members_.size());
}

int GroupCore::member_of(int world_rank) const noexcept {
  const auto found = std::ranges::find(members_, world_rank);
  return found == members_.end() ? -1 : static_cast<int>(found - members_.begin());
}

std::string GroupCore::rank_name(int member) const {
  return describe_rank(member, options_->global_rank(world_rank(member)));
}

void GroupCore::log(LogLevel level, const std::string& text) const {
  if (const auto& logger = options_->communicator.logger; logger != nullptr) logger->write(level, text);
}

void GroupCore::abort(std::string_view reason) noexcept {
  fail({FailureKind::aborted, rank_name(rank_) + " aborted: " + std::string(reason)}, true);
}

void GroupCore::throw_failure(const Operation&) { failure_.rethrow(); }

void GroupCore::publish_failure(bool notify) noexcept {
  options_->record_failure(failure_.get().cause);
  if (notify) send_failure(failure_.get());
  log(LogLevel::debug, failure_.get().cause);
}

std::string GroupCore::timeout_message(const Operation& op, const std::string& reason) {
  return op.format() + ": not done within " + format_duration(op.call.timeout) + "; " + reason;
}

std::string GroupCore::describe_delay(const Operation& op, std::uint64_t wanted,
                                      std::span<const MemberProgress> replies, std::string_view otherwise) const {
  std::string text;
  for (const auto& [member, called] : replies) {
    std::string state;
    if (!called) {
      state = " is not responding";
    } else if (op.is_message()) {
      state = " has not posted the matching send or receive";
    } else if (*called < wanted) {
      state = " is behind at operation #" + std::to_string(*called);
    }
    if (!state.empty()) text += (text.empty() ? "" : "; ") + rank_name(member) + state;
  }
  return text.empty() ? std::string(otherwise) : text;
}

}  // namespace tessera::comm
