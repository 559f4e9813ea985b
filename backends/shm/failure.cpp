// Failure of operations: once per communicator, on all ranks, with the first cause.
#include <algorithm>
#include <cstring>
#include <thread>

#include "backends/shm/shm_group.h"
#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/comm/core/format.h"

namespace tessera::comm::shm {
namespace {

using namespace std::chrono_literals;
constexpr auto kAnswerTime = 250ms;  ///< a live rank answers a ping within microseconds

std::string number(std::uint64_t value) { return std::to_string(value); }

}  // namespace

void ShmGroup::throw_failure() const { comm::throw_failure({failure_, cause_}); }

/// Runs under the engine's lock, so no thread advances an operation meanwhile: once the operations are marked as
/// failed, this rank no longer writes the caller's memory.
void ShmGroup::fail(FailureKind kind, std::string_view text) noexcept {
  if (!failed_.load()) {
    failure_ = kind;
    cause_ = text;
    failed_.store(true);
    host_->options().note_failure(cause_);
    host_->arena().quarantine();
    host_->staging().quarantine();
    FailureRecord& record = own().head().failure;
    record.kind = kind;
    const std::size_t length = std::min(text.size(), record.text.size() - 1);
    std::memcpy(record.text.data(), text.data(), length);
    record.text[length] = '\0';
    record.state.store(1);
    notify();
    if (const auto& logger = host_->options().communicator.logger) logger->write(LogLevel::debug, cause_);
  }
  drain_submissions();
  while (!collectives_.empty()) complete(collectives_.pop(), ShmOperation::kFailed);
  for (std::vector<MessageChannel>* side : {&sends_, &receives_})
    for (MessageChannel& channel : *side)
      while (!channel.queue.empty()) complete(channel.queue.pop(), ShmOperation::kFailed);
  messages_waiting_ = 0;
}

void ShmGroup::abort(std::string_view reason) noexcept {
  const std::lock_guard lock(host_->engine().mutex());
  if (!failed_.load()) fail(FailureKind::aborted, rank_name(rank_) + " aborted: " + std::string(reason));
}

std::string ShmGroup::rank_name(int member) const {
  return comm::describe_rank(member, host_->options().job_rank(world_rank(member)));
}

std::string ShmGroup::describe(const ShmOperation& op) const { return comm::describe(op.call, op.sequence); }

/// Whether the ranks that have arrived call the same operation.
bool ShmGroup::fits_others(const ShmOperation& op) {
  bool same = true;
  for (int k = 0; k < size_; ++k)
    if (op.awaits(k)) same &= port(k).slot(op.sequence).fingerprint == op.fingerprint;
  return same;
}

std::string ShmGroup::table_of(const ShmOperation& op) {
  std::string table = "operation #" + number(op.sequence) + " differs between the ranks:";
  for (int k = 0; k < size_; ++k) {
    const CollectiveSlot& slot = port(k).slot(op.sequence);
    table += (k == 0 ? " " : "; ") + rank_name(k) + ": " + std::string(name_of(slot.kind));
    if (slot.kind == OpKind::barrier) continue;
    table += " of " + number(slot.count) + " " + std::string(name_of(slot.dtype));
    if (slot.kind == OpKind::all_reduce || slot.kind == OpKind::reduce_scatter || slot.kind == OpKind::reduce)
      table += " " + std::string(name_of(slot.reduce));
    if (slot.kind == OpKind::broadcast || slot.kind == OpKind::reduce || slot.kind == OpKind::gather ||
        slot.kind == OpKind::scatter)
      table += " root " + std::to_string(slot.root);
    // A slot has no room for the labels of other ranks, which checked mode compares.
    if (k == rank_ && !op.call.label.empty()) table += " (" + std::string(op.call.label) + ")";
  }
  return table;
}

bool ShmGroup::adopt_peer_failure() noexcept {
  for (int k = 0; k < size_; ++k) {
    const FailureRecord& record = port(k).head().failure;
    if (k == rank_ || record.state.load() == 0) continue;
    fail(record.kind, record.text.data());
    return true;
  }
  return false;
}

/// Checks the deadlines and the peers. True: the communicator has failed.
bool ShmGroup::check_health() noexcept {
  if (adopt_peer_failure()) return true;
  const Clock::time_point now = Clock::now();
  if (!collectives_.empty()) check_peers(*collectives_.head);
  for (std::vector<MessageChannel>* side : {&sends_, &receives_}) {
    if (messages_waiting_ == 0) break;
    for (MessageChannel& channel : *side)
      if (!failed_.load() && !channel.queue.empty()) check_peers(*channel.queue.head);
  }
  const auto too_late = [&](const OpQueue& queue) {  // the first one delays the others
    for (const ShmOperation* op = queue.head; op != nullptr; op = op->next)
      if (now >= op->deadline.load(std::memory_order_relaxed)) return true;
    return false;
  };
  if (!failed_.load() && too_late(collectives_)) time_out(*collectives_.head);
  for (std::vector<MessageChannel>* side : {&sends_, &receives_})
    for (MessageChannel& channel : *side)
      if (!failed_.load() && too_late(channel.queue)) time_out(*channel.queue.head);
  return failed_.load();
}

std::uint64_t ShmGroup::announced_by(int member) const {
  const ControlBlock& theirs = ports_[static_cast<std::size_t>(member)];
  return std::max(theirs.slot(0).sequence.load(), theirs.slot(1).sequence.load());
}

void ShmGroup::check_peers(const ShmOperation& op) noexcept {
  const bool message = op.call.kind == OpKind::send || op.call.kind == OpKind::recv;
  for (int k = 0; k < size_; ++k) {
    if (k == rank_ || (message && k != op.call.root)) continue;
    const RankRecord& entry = board(k);
    const std::string who = rank_name(k);
    if (entry.lost.load() != 0)
      return fail(FailureKind::peer_lost,
                  describe(op) + ": " + who + " died (process " + std::to_string(entry.pid.load()) + ")");
    if (entry.left.load() == 0) continue;
    const bool stuck =
        !message ? announced_by(k) < op.sequence
        : op.call.kind == OpKind::recv
            ? (port(k).sends(rank_).sent.load() >> kRoundBits) <= receives_[static_cast<std::size_t>(k)].messages
            : rounds_of(port(k).received(rank_).load(), sends_[static_cast<std::size_t>(k)].messages) != kAllRounds;
    if (stuck)
      return fail(FailureKind::peer_lost,
                  describe(op) + ": " + describe_leaving(who, entry.first_failure_cause.data()));
  }
}

void ShmGroup::time_out(const ShmOperation& op) noexcept {
  const bool message = op.call.kind == OpKind::send || op.call.kind == OpKind::recv;
  std::vector<std::uint32_t> asked(static_cast<std::size_t>(size_));
  const auto answered = [&](int k) {
    return static_cast<std::int32_t>(board(k).bell.pong.load() - asked[static_cast<std::size_t>(k)]) >= 0;
  };
  for (int k = 0; k < size_; ++k)
    if (k != rank_) asked[static_cast<std::size_t>(k)] = send_ping(board(k).bell);
  const Clock::time_point until = Clock::now() + kAnswerTime;
  for (bool all = false; !all && Clock::now() < until;) {
    host_->engine().answer_pings();  // the others may be asking at the same moment
    std::this_thread::sleep_for(1ms);
    all = true;
    for (int k = 0; k < size_; ++k) all &= k == rank_ || answered(k);
  }
  // Another rank may have published the cause during the pings.
  if (adopt_peer_failure()) return;
  std::string behind;
  // Before its announcement, an operation waits until all ranks are done with the one whose slot it reuses.
  const bool queued = !message && op.stage == ShmOperation::Stage::queued;
  const std::uint64_t wanted = queued ? op.sequence - 1 : op.sequence;
  for (int k = 0; k < size_; ++k) {
    if (k == rank_ || (message ? k != op.call.root : !queued && !op.awaits(k))) continue;
    const std::uint64_t at = announced_by(k);
    if (!answered(k)) {
      behind += "; " + rank_name(k) + " is not responding";
    } else if (message) {
      behind += "; " + rank_name(k) + " has not posted the matching send or receive";
    } else if (at < wanted) {
      behind += "; " + rank_name(k) + " is behind at operation #" + number(at);
    }
  }
  if (behind.empty()) behind = "; all ranks have called it, and it is still under way";
  const auto limit = op.call.timeout;
  fail(FailureKind::timeout, describe(op) + ": not done within " + format_duration(limit) + behind);
}

}  // namespace tessera::comm::shm
