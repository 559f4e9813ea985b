#include "tessera/comm/core/group_core.h"

#include <algorithm>
#include <new>

#include "tessera/base/checksum.h"
#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/comm/core/op_traits.h"

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

std::uint64_t CallVerifier::fingerprint(std::string_view signature) noexcept {
  return base::checksum(std::as_bytes(std::span(signature)));
}

bool CallVerifier::submit(int member, std::uint64_t sequence, std::string signature, std::uint64_t fingerprint) {
  Calls& calls = calls_[sequence];
  calls.signatures.resize(members_);
  calls.fingerprints.resize(members_);
  calls.signatures[static_cast<std::size_t>(member)] = std::move(signature);
  calls.fingerprints[static_cast<std::size_t>(member)] = fingerprint;
  return ++calls.submitted == members_;
}

bool CallVerifier::verified(std::uint64_t sequence) const {
  const auto found = calls_.find(sequence);
  if (found == calls_.end() || found->second.submitted < members_) return false;
  const auto& all = found->second.fingerprints;
  return std::ranges::all_of(all, [&](std::uint64_t one) { return one == all.front(); });
}

std::string CallVerifier::mismatch(std::uint64_t sequence, const std::function<std::string(int)>& rank_name) const {
  const std::vector<std::string>& signatures = calls_.at(sequence).signatures;
  return format_mismatch(sequence, static_cast<int>(members_), [&](int member) {
    return rank_name(member) + ": " + signatures[static_cast<std::size_t>(member)];
  });
}

std::string CallVerifier::format_mismatch(std::uint64_t sequence, int members,
                                          const std::function<std::string(int)>& row) {
  std::string table = "operation #" + std::to_string(sequence) + " differs between the ranks:";
  for (int member = 0; member < members; ++member) table += (member == 0 ? " " : "; ") + row(member);
  return table;
}

void FirstFailureRecord::record(std::string_view cause) noexcept {
  const std::lock_guard lock(mutex_);
  if (!cause_.empty()) return;
  try {
    cause_ = cause;
  } catch (const std::bad_alloc&) {  // the cause is then not recorded
  }
}

std::string FirstFailureRecord::cause() const {
  const std::lock_guard lock(mutex_);
  return cause_;
}

void throw_failure(const Failure& failure) {
  switch (failure.kind) {
    case FailureKind::mismatch:
      throw Mismatch(failure.cause);
    case FailureKind::timeout:
      throw Timeout(failure.cause);
    case FailureKind::peer_lost:
      throw PeerLost(failure.cause);
    case FailureKind::aborted:
      throw Aborted(failure.cause);
    case FailureKind::system:
      throw SystemError(failure.cause);
    case FailureKind::backend:
    case FailureKind::none:
      break;
  }
  throw BackendError(failure.cause);
}

}  // namespace tessera::comm
