// Failure of operations over a transport: once per communicator, on all ranks, with the first cause.
#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/comm/core/format.h"
#include "tessera/comm/host/host_group.h"

namespace tessera::comm::host {
namespace {

std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : text) hash = (hash ^ static_cast<std::uint8_t>(c)) * 0x100000001b3U;
  return hash;
}

}  // namespace

std::string HostGroup::rank_name(int member) const {
  return describe_rank(member, world_->options().job_rank(world_rank(member)));
}

void HostGroup::throw_failure() const { comm::throw_failure(failure_); }

/// Once the operations are marked as failed, their messages are cancelled, so nothing writes the caller's memory any
/// more.
void HostGroup::fail(Failure failure, bool tell) noexcept {
  const bool first = !failed_.load();
  if (first) {
    failure_ = std::move(failure);
    failed_.store(true);
    world_->options().note_failure(failure_.cause);
    if (tell)
      for (int k = 0; k < size(); ++k)
        if (k != rank_)
          world_->tell(world_rank(k), {.kind = ControlMessage::Kind::failure,
                                       .communicator = number_,
                                       .number = static_cast<std::uint64_t>(failure_.kind),
                                       .text = failure_.cause});
    if (options_.logger != nullptr) options_.logger->write(LogLevel::debug, failure_.cause);
  }
  calls_.clear();
  for (ScheduleExecutor* op : running_) op->cancel();
  while (!running_.empty()) finish(*running_.back(), ScheduleExecutor::kFailed);
  if (first) world_->transport().discard_communicator(number_);
  world_->update_transport_polling();
}

void HostGroup::abort(std::string_view reason) noexcept {
  const std::lock_guard lock(world_->engine().mutex());
  submitted();
  if (!failed_.load()) fail({FailureKind::aborted, rank_name(rank_) + " aborted: " + std::string(reason)}, true);
}

/// Checked mode: sends this rank's signature to the other ranks.
void HostGroup::announce(ScheduleExecutor& op) noexcept {
  const std::uint64_t fingerprint = hash_of(op.called);
  for (int k = 0; k < size(); ++k)
    if (k != rank_)
      world_->tell(world_rank(k), {.kind = ControlMessage::Kind::call,
                                   .communicator = number_,
                                   .number = op.sequence,
                                   .value = fingerprint,
                                   .text = op.called});
  hear_call(rank_, op.sequence, fingerprint, op.called);
}

void HostGroup::hear_call(int member, std::uint64_t sequence, std::uint64_t fingerprint,
                          const std::string& text) noexcept {
  if (failed_.load()) return;
  Tagged& tagged = calls_[sequence];
  tagged.texts.resize(members_.size());
  tagged.fingerprints.resize(members_.size());
  tagged.texts[static_cast<std::size_t>(member)] = text;
  tagged.fingerprints[static_cast<std::size_t>(member)] = fingerprint;
  if (++tagged.here < members_.size()) return;
  const bool same = std::all_of(tagged.fingerprints.begin(), tagged.fingerprints.end(),
                                [&](std::uint64_t one) { return one == tagged.fingerprints.front(); });
  if (!same) {
    std::string table = "operation #" + std::to_string(sequence) + " differs between the ranks:";
    for (int k = 0; k < size(); ++k)
      table += (k == 0 ? " " : "; ") + rank_name(k) + ": " + tagged.texts[static_cast<std::size_t>(k)];
    return fail({FailureKind::mismatch, table}, true);
  }
  calls_.erase(sequence);
  const auto found = std::find_if(running_.begin(), running_.end(), [&](const ScheduleExecutor* op) {
    return !op->called.empty() && op->sequence == sequence;
  });
  if (found == running_.end()) return;
  (*found)->agreed = true;
  settle(**found);
}

/// Why this operation can't complete any more, or "".
std::string HostGroup::trouble_with(const ScheduleExecutor& op) const {
  for (int k = 0; k < size(); ++k) {
    if (k == rank_) continue;
    const Peer& peer = world_->peer(world_rank(k));
    if (!peer.left && !peer.died && !peer.cut) continue;
    if (!op.needs(k)) continue;
    if (peer.died) return rank_name(k) + " died";
    // Messages sent before it left may still be in flight: wait until the connection ends or has been quiet for a
    // while.
    const bool quiet = Clock::now() - std::max(peer.since, world_->last_moved()) > kVerdictTime;
    if (peer.left && (peer.cut || quiet)) return describe_leaving(rank_name(k), peer.why);
    if (!peer.left && quiet && world_->would_have_heard(peer))
      return "the connection to " + rank_name(k) + " is lost: " + peer.why;
  }
  return {};
}

/// Checks the deadlines and the peers' health.
void HostGroup::check_health() noexcept {
  const Clock::time_point now = Clock::now();
  for (const ScheduleExecutor* op : running_) {
    const std::string trouble = trouble_with(*op);
    if (!trouble.empty())
      return fail({FailureKind::peer_lost, describe(op->call, op->sequence) + ": " + trouble}, true);
  }
  for (const ScheduleExecutor* op : running_)
    if (now >= op->deadline) return time_out(*op);
}

void HostGroup::time_out(const ScheduleExecutor& op) noexcept {
  const std::string what = describe(op.call, op.sequence) + ": not done within " + format_duration(op.call.timeout);
  const std::vector<std::optional<std::uint64_t>> at = world_->ask(*this);
  world_->hear();  // the cause may have arrived meanwhile
  if (failed_.load()) return;
  fail({FailureKind::timeout, what + describe_answers(op, at)}, true);
}

/// The ranks that delay the operation, according to the last operation called that each world rank reports.
std::string HostGroup::describe_answers(const ScheduleExecutor& op,
                                        const std::vector<std::optional<std::uint64_t>>& at) const {
  const auto answer_of = [&](int k) -> const auto& { return at[static_cast<std::size_t>(world_rank(k))]; };
  // Questions go through rank 0: if it doesn't answer, nothing is known of the others.
  if (world_->rank() != kHub && !at[kHub]) return "; " + world_->name_hub(*this);
  const bool message = op.call.kind == OpKind::send || op.call.kind == OpKind::recv;
  int answers = 0;
  for (int k = 0; k < size(); ++k) answers += k != rank_ && answer_of(k).has_value() ? 1 : 0;
  if (answers == 0 && size() > 2 && !message)
    return "; none of the other " + std::to_string(size() - 1) + " ranks is responding: this one may be cut off";
  std::string behind;
  for (int k = 0; k < size(); ++k) {
    if (k == rank_ || (message && k != op.call.root)) continue;
    const auto& answer = answer_of(k);
    if (!answer) {
      behind += "; " + rank_name(k) + " is not responding";
    } else if (message) {
      behind += "; " + rank_name(k) + " has not posted the matching send or receive";
    } else if (*answer < op.sequence) {
      behind += "; " + rank_name(k) + " is behind at operation #" + std::to_string(*answer);
    }
  }
  return behind.empty() ? "; all ranks have called it, and it is still under way" : behind;
}

/// Names rank 0, which did not answer.
std::string HostRuntime::name_hub(const HostGroup& group) const {
  const int member = group.member_of(kHub);
  const Peer& hub = peers_[kHub];
  const char* const state = hub.died ? " died" : hub.left ? " has left" : " is not responding";
  if (member >= 0) return group.rank_name(member) + state + ", so the others can't be asked";
  return "rank " + std::to_string(options_.job_rank(kHub)) + state +
         ", over which the ranks of this communicator ask each other";
}

/// A leaving rank's announcement goes through rank 0. While rank 0 doesn't answer, a connection that ended may have
/// been closed normally.
bool HostRuntime::would_have_heard(const Peer& peer) const {
  const Peer& hub = peers_[kHub];
  return rank() == kHub || hub.died || hub.left || hub.cut || heard_from_hub_.load() >= peer.asked_hub;
}

/// A library may detect a dead rank first, with its own message: wait a while for the actual cause to be reported.
void HostRuntime::transport_failed(const std::string& why) noexcept {
  if (!transport_failure_.empty()) return;
  transport_failure_ = capabilities_.backend + ": " + why;
  transport_blamed_at_ = Clock::now() + kVerdictTime;
  update_transport_polling();
}

/// No other cause is possible, so don't wait for one.
void HostRuntime::message_damaged(int peer, const std::string& what) noexcept {
  transport_failure_ = capabilities_.backend + ": " + what + " from " + describe_rank(peer, options_.job_rank(peer)) +
                       " came damaged: its checksum is wrong; check the network and the memory of the two hosts, and "
                       "go on from the last checkpoint";
  transport_blamed_at_ = Clock::now();
  update_transport_polling();
}

void HostRuntime::blame_transport() noexcept {
  if (transport_failure_.empty() || Clock::now() < transport_blamed_at_) return;
  const std::string why = std::exchange(transport_failure_, {});
  for (std::size_t i = 0; i < groups_.size(); ++i) groups_[i]->fail({FailureKind::backend, why}, true);
}

}  // namespace tessera::comm::host
