// Failure of a communicator: once, on all its ranks, with the first cause.
#include <algorithm>

#include "backends/nccl/nccl_group.h"
#include "tessera/base/error.h"
#include "tessera/comm/core/backoff.h"

namespace tessera::comm::nccl {
namespace {

using namespace std::chrono_literals;
constexpr auto kVerdictTime = 500ms;  ///< after a broken connection the control channel names the dead rank
constexpr auto kStopTime = 5s;        ///< in which a device stops after an abort

}  // namespace

std::string NcclGroup::vendor_text_locked(const NcclError& error) const {
  std::string text = "nccl: " + std::string(error.function) + ": " + api_.ncclGetErrorString(error.result);
  const char* last = comm_ != nullptr ? api_.ncclGetLastError(comm_) : nullptr;
  if (last != nullptr && *last != '\0') text += " (" + std::string(last) + ")";
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

ncclResult_t NcclGroup::state_locked() const noexcept {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = api_.ncclCommGetAsyncError(comm_, &state);
  return asked == ncclSuccess ? state : asked;
}

NcclGroup::Health NcclGroup::health_locked(Failure& failure) noexcept {
  const ncclResult_t state = state_locked();
  if (state == ncclSuccess || state == ncclInProgress) return Health::ok;
  if (state == ncclRemoteError || state == ncclSystemError) {
    if (!suspect_since_) suspect_since_ = Clock::now();
    if (Clock::now() < *suspect_since_ + kVerdictTime) return Health::suspect;
  }
  const std::string what = in_flight_.empty() ? "" : in_flight_.front()->format() + ": ";
  failure = {FailureKind::backend, what + vendor_text_locked({state, "asynchronous error"})};
  return Health::failed;
}

/// Whether an operation waits for a member that closed its communicator before it called the operation.
void NcclGroup::find_departure_locked(Failure& failure) const {
  // Later operations have later sequence numbers.
  const auto op =
      std::find_if(in_flight_.begin(), in_flight_.end(), [](const auto* one) { return one->sequence != 0; });
  for (std::size_t k = 0; op != in_flight_.end() && k < closed_.size(); ++k)
    if (closed_[k] && *closed_[k] < (*op)->sequence) {
      failure = {FailureKind::peer_lost,
                 (*op)->format() + ": " + rank_name(static_cast<int>(k)) + " has closed its communicator"};
      return;
    }
}

/// Completes finished operations and reports the failure, if any.
void NcclGroup::retire_locked(std::vector<NcclOperation*>& completed, Failure& failure) noexcept {
  std::size_t count = 0;
  cudaError_t error = cudaSuccess;
  const auto is_complete = [&](const NcclOperation& op) {
    return op.recorded && verified_locked(op) && op.event.reached(error) && error == cudaSuccess;
  };
  while (count < in_flight_.size() && is_complete(*in_flight_[count])) ++count;
  // The device may have stopped because of an error that NCCL knows by now.
  const Health health = health_locked(failure);
  if (health == Health::suspect) find_departure_locked(failure);  // then its name explains the broken connection
  if (health != Health::ok) return;
  suspect_since_.reset();
  if (error != cudaSuccess)
    failure = {FailureKind::backend, in_flight_[count]->format() + ": nccl: " + api_.cudaGetErrorString(error)};
  for (; count > 0; --count) {
    NcclOperation* const op = in_flight_.front();
    op->state.store(Operation::succeeded);
    verifier_.erase(op->sequence);
    completed.push_back(op);
    in_flight_.pop_front();
  }
  if (failure.kind == FailureKind::none) find_departure_locked(failure);
}

void NcclGroup::retire_completed() noexcept {
  std::vector<NcclOperation*> completed;
  Failure failure;
  {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return;
    retire_locked(completed, failure);
  }
  release_operations(completed);
  if (failure.kind != FailureKind::none) fail(std::move(failure), true);
}

void NcclGroup::release_operations(std::span<NcclOperation* const> completed) noexcept {
  for (NcclOperation* op : completed) op->release();
  runtime_->end_operations(completed.size());
}

void NcclGroup::check_health() noexcept {
  retire_completed();
  NcclOperation* late = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const Clock::time_point now = Clock::now();
    const bool any =
        std::any_of(in_flight_.begin(), in_flight_.end(), [&](const auto* op) { return op->is_late(now); });
    if (!any) return;
    late = in_flight_.front();  // it delays the late operation, if it is not late itself
    late->retain();
  }
  fail_with_timeout(*late);
  late->release();
}

bool NcclGroup::wait_for(Operation& op, Clock::time_point until) noexcept {
  Backoff pause;
  while (!op.done()) {
    const Clock::time_point now = Clock::now();
    if (op.is_late(now)) {
      fail_with_timeout(op);
      continue;
    }
    if (now >= until) return false;
    pause(std::min(until, op.deadline.load()) - now);
  }
  return true;
}

void NcclGroup::fail_with_timeout(const Operation& op) noexcept {
  const std::lock_guard one_at_a_time(timeout_mutex_);
  const auto ended = [&] {
    retire_completed();
    return failed() || op.state.load() != Operation::pending;
  };
  if (ended()) return;
  const std::vector<std::optional<std::uint64_t>> called = runtime_->monitor().query_progress(id_, members());
  if (ended()) return;  // another rank may have reported the cause meanwhile
  std::vector<MemberProgress> replies;
  for (int k = 0; k < size(); ++k)
    if (k != rank() && (!op.is_message() || k == op.call.root))
      replies.push_back({k, called[static_cast<std::size_t>(world_rank(k))]});
  const std::string delay = describe_delay(op, op.sequence, replies, "all ranks respond, and it is still under way");
  fail({FailureKind::timeout, timeout_message(op, delay)}, true);
}

void NcclGroup::fail(Failure failure, bool notify) noexcept {
  std::vector<NcclOperation*> ended;
  {
    const std::lock_guard lock(mutex_);
    if (failed()) return;
    if (comm_ != nullptr) {
      Failure ignored;
      retire_locked(ended, ignored);  // what completed before the failure has not failed
      aborter_ = CommAborter::start(api_, runtime_->device(), std::exchange(comm_, nullptr));
    }
    failure_.set(std::move(failure));
    for (NcclOperation* op : in_flight_) op->state.store(Operation::failed);
    ended.insert(ended.end(), in_flight_.begin(), in_flight_.end());
    in_flight_.clear();
    verifier_.clear();
  }
  publish_failure(notify);
  release_operations(ended);
}

void NcclGroup::send_failure(const Failure& failure) noexcept {
  runtime_->monitor().send(members(), {.kind = ControlMessage::Kind::failure,
                                       .communicator = id_,
                                       .number = static_cast<std::uint64_t>(failure.kind),
                                       .text = failure.cause});
}

void NcclGroup::on_peer_lost(int world_rank) noexcept {
  const int member = member_of(world_rank);
  if (member < 0) return;
  std::string what;
  {
    const std::lock_guard lock(mutex_);
    if (!in_flight_.empty()) what = in_flight_.front()->format() + ": ";
  }
  fail({FailureKind::peer_lost, what + rank_name(member) + " died"}, true);
}

void NcclGroup::on_departure(int world_rank, std::uint64_t called) noexcept {
  const int member = member_of(world_rank);
  if (member < 0) return;
  const std::lock_guard lock(mutex_);
  closed_[static_cast<std::size_t>(member)] = called;
}

/// Checked mode: NCCL itself hangs or computes wrong results if the calls of the ranks differ.
void NcclGroup::send_signature(const NcclOperation& op) {
  const ControlMessage message{.kind = ControlMessage::Kind::call,
                               .from = runtime_->rank(),
                               .communicator = id_,
                               .number = op.sequence,
                               .value = CallVerifier::fingerprint(op.signature),
                               .text = op.signature};
  runtime_->monitor().send(members(), message);
  on_op_signature(message);
}

bool NcclGroup::verified_locked(const NcclOperation& op) const {
  return op.signature.empty() || verifier_.verified(op.sequence);
}

void NcclGroup::on_op_signature(const ControlMessage& message) noexcept {
  const int member = member_of(message.from);
  if (member < 0) return;
  std::string mismatch;
  {
    const std::lock_guard lock(mutex_);
    if (failed() || !verifier_.submit(member, message.number, message.text, message.value) ||
        verifier_.verified(message.number))
      return;
    mismatch = verifier_.mismatch(message.number, [this](int k) { return rank_name(k); });
  }
  fail({FailureKind::mismatch, mismatch}, true);
}

Clock::time_point NcclGroup::stop_deadline() const noexcept {
  return does_not_stop_.load() ? Clock::now() : Clock::now() + kStopTime;
}

void NcclGroup::throw_failure(const Operation& op) {
  std::shared_ptr<CommAborter> aborter;
  {
    const std::lock_guard lock(mutex_);
    aborter = aborter_;
  }
  const Clock::time_point until = stop_deadline();
  bool stopped = aborter == nullptr || aborter->wait_until(until);
  Backoff pause;
  cudaError_t error = cudaSuccess;
  while (stopped && !static_cast<const NcclOperation&>(op).event.reached(error)) {
    stopped = Clock::now() < until;
    pause(1ms);
  }
  Failure failure = failure_.get();
  if (!stopped) does_not_stop_.store(true);
  if (!stopped) failure.cause += " (and the device has not stopped: its memory may still change)";
  comm::throw_failure(failure);
}

}  // namespace tessera::comm::nccl
