#include "backends/nccl/stream_group.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/core/backoff.h"

namespace tessera::comm::nccl {

using namespace std::chrono_literals;
namespace {

/// A key as the first member sends it. Throws BackendError.
ncclUniqueId key_of_hex(const std::string& hex) {
  ncclUniqueId key{};
  if (hex.size() != 2 * sizeof(key.internal)) throw BackendError("nccl: the key of a communicator is damaged");
  for (std::size_t i = 0; i < sizeof(key.internal); ++i)
    key.internal[i] = static_cast<char>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
  return key;
}

}  // namespace

StreamGroup::StreamGroup(std::shared_ptr<NcclRuntime> runtime, std::uint64_t id)
    : GroupCore({runtime, &runtime->options()}, 0, {}),
      runtime_(std::move(runtime)),
      api_(runtime_->api()),
      comm_(api_, runtime_->device()),
      id_(id) {}

void StreamGroup::enter_members(int rank, std::vector<int> members) {
  closed_.resize(members.size());
  has_begun_.assign(members.size(), true);
  verifier_ = CallVerifier(members.size());
  set_members(rank, std::move(members));
}

void StreamGroup::wait_ready(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  if (!comm_.wait_ready(lock, until)) failure_.rethrow();
}

void StreamGroup::on_group_key(const ControlMessage& message) noexcept {
  const int member = member_of(message.from);
  if (member < 0) return;
  const std::lock_guard lock(mutex_);
  has_begun_[static_cast<std::size_t>(member)] = true;
  if (member == 0) key_ = message.text;
}

ncclUniqueId StreamGroup::wait_for_key(Clock::time_point until) {
  Backoff pause;
  for (std::string key; true; pause(1ms)) {
    throw_if_failed();
    {
      const std::lock_guard lock(mutex_);
      key = key_;
    }
    if (!key.empty()) return key_of_hex(key);
    if (Clock::now() > until) throw Timeout("nccl: no key");
  }
}

std::string StreamGroup::describe_absent() const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (int k = 0; k < size(); ++k)
    if (k != rank() && !has_begun_[static_cast<std::size_t>(k)])
      text += (text.empty() ? ": " : "; ") + rank_name(k) + " has not called it";
  return text;
}

void StreamGroup::call_nccl(const Issue& issue) {
  const std::lock_guard lock(mutex_);
  if (failed()) return;
  try {
    issue();
  } catch (const NcclError& error) {
    throw BackendError(comm_.format(error));
  }
}

Work StreamGroup::launch(NcclOperation& op, const Issue& issue, const Issue& and_then) {
  op.group = shared_from_this();
  const WorkRef hold(op);
  throw_if_failed();
  if (!op.signature.empty())
    send_signature(op);  // before the call: NCCL may hang if the ranks call different operations
  runtime_->begin_operation();
  try {
    call_nccl([&] {
      stream_->begin_operation();
      op.retain();
      in_flight_.push_back(&op);
      issue();
    });
    if (and_then) {
      wait_enqueued(op, false);
      call_nccl(and_then);
    }
  } catch (const BackendError& error) {
    fail({FailureKind::backend, op.format() + ": " + error.what()}, true);
  }
  wait_enqueued(op, true);
  return Work(&op);
}

/// Waits until NCCL has enqueued what was issued. `all`: this was all of the operation, so its event is recorded.
void StreamGroup::wait_enqueued(NcclOperation& op, bool all) {
  Backoff pause;
  while (!failed()) {
    Failure failure;
    {
      const std::lock_guard lock(mutex_);
      if (comm_.get() == nullptr) break;
      const ncclResult_t state = comm_.state();
      if (state == ncclSuccess && !all) return;
      if (state == ncclSuccess) {
        const cudaError_t error = api_.cudaEventRecord(op.event.get(), stream_->get());
        op.recorded = error == cudaSuccess;
        if (op.recorded) return;
        failure = {FailureKind::backend, op.format() + ": nccl: cudaEventRecord: " + api_.cudaGetErrorString(error)};
      } else if (state != ncclInProgress) {
        health_locked(failure);
      }
    }
    if (failure.kind != FailureKind::none) fail(std::move(failure), true);
    if (op.is_late(Clock::now())) fail_with_timeout(op);
    pause(1ms);
  }
  api_.cudaEventRecord(op.event.get(), stream_->get());  // what is on the stream must complete before the exception
  throw_failure(op);
}

/// "all_reduce #12: ", which names the first operation in flight; empty if there is none.
std::string StreamGroup::prefix_locked() const { return in_flight_.empty() ? "" : in_flight_.front()->format() + ": "; }

NcclComm::Health StreamGroup::health_locked(Failure& failure) noexcept {
  std::string problem;
  const NcclComm::Health health = comm_.health(problem);
  if (health == NcclComm::Health::failed) failure = {FailureKind::backend, prefix_locked() + problem};
  return health;
}

/// Whether an operation waits for a member that closed its communicator before it called the operation.
void StreamGroup::find_departure_locked(Failure& failure) const {
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
void StreamGroup::retire_locked(std::vector<NcclOperation*>& completed, Failure& failure) noexcept {
  std::size_t count = 0;
  cudaError_t error = cudaSuccess;
  const auto is_complete = [&](const NcclOperation& op) {
    return op.recorded && verified_locked(op) && op.event.reached(error) && error == cudaSuccess;
  };
  while (count < in_flight_.size() && is_complete(*in_flight_[count])) ++count;
  // The device may have stopped because of an error that NCCL knows by now.
  const NcclComm::Health health = health_locked(failure);
  if (health == NcclComm::Health::suspect) find_departure_locked(failure);  // it explains the broken connection
  if (health != NcclComm::Health::ok) return;
  for (; count > 0; --count) {
    NcclOperation* const op = in_flight_.front();
    op->state.store(Operation::succeeded);
    verifier_.erase(op->sequence);
    completed.push_back(op);
    in_flight_.pop_front();
  }
  if (error != cudaSuccess)
    failure = {FailureKind::backend, prefix_locked() + "nccl: " + api_.cudaGetErrorString(error)};
  else
    find_departure_locked(failure);
}

void StreamGroup::retire_completed() noexcept {
  std::vector<NcclOperation*> completed;
  Failure failure;
  {
    const std::lock_guard lock(mutex_);
    if (comm_.get() == nullptr) return;
    retire_locked(completed, failure);
  }
  release_operations(completed);
  if (failure.kind != FailureKind::none) fail(std::move(failure), true);
}

void StreamGroup::release_operations(std::span<NcclOperation* const> ended) noexcept {
  for (NcclOperation* op : ended) op->release();
  runtime_->end_operations(ended.size());
}

void StreamGroup::check_health() noexcept {
  retire_completed();
  NcclOperation* late = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const auto is_late = [now = Clock::now()](const NcclOperation* op) { return op->is_late(now); };
    if (std::none_of(in_flight_.begin(), in_flight_.end(), is_late)) return;
    late = in_flight_.front();  // it delays the late operation, if it is not late itself
    late->retain();
  }
  fail_with_timeout(*late);
  late->release();
}

void StreamGroup::drain() noexcept {
  Backoff pause;
  while (true) {  // ends: every operation has a deadline, at which it fails
    check_health();
    const std::lock_guard lock(mutex_);
    if (in_flight_.empty()) return;
    pause(1ms);
  }
}

bool StreamGroup::wait_for(Operation& op, Clock::time_point until) noexcept {
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

void StreamGroup::fail_with_timeout(const Operation& op) noexcept {
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

void StreamGroup::fail(Failure failure, bool notify) noexcept {
  std::vector<NcclOperation*> ended;
  {
    const std::lock_guard lock(mutex_);
    if (failed()) return;
    if (comm_.get() != nullptr) {
      Failure ignored;
      retire_locked(ended, ignored);  // what completed before the failure has not failed
      comm_.abort();
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

void StreamGroup::send_failure(const Failure& failure) noexcept {
  runtime_->monitor().send(members(), {.kind = ControlMessage::Kind::failure,
                                       .communicator = id_,
                                       .number = static_cast<std::uint64_t>(failure.kind),
                                       .text = failure.cause});
}

void StreamGroup::on_peer_lost(int world_rank) noexcept {
  const int member = member_of(world_rank);
  if (member < 0) return;
  std::string what;
  {
    const std::lock_guard lock(mutex_);
    what = prefix_locked();
  }
  fail({FailureKind::peer_lost, what + rank_name(member) + " died"}, true);
}

void StreamGroup::on_departure(int world_rank, std::uint64_t called) noexcept {
  const int member = member_of(world_rank);
  if (member < 0) return;
  const std::lock_guard lock(mutex_);
  closed_[static_cast<std::size_t>(member)] = called;
}

/// Checked mode: NCCL itself hangs or computes wrong results if the calls of the ranks differ.
void StreamGroup::send_signature(const NcclOperation& op) {
  const ControlMessage message{.kind = ControlMessage::Kind::op_signature,
                               .from = runtime_->rank(),
                               .communicator = id_,
                               .number = op.sequence,
                               .value = CallVerifier::fingerprint(op.signature),
                               .text = op.signature};
  runtime_->monitor().send(members(), message);
  on_op_signature(message);
}

bool StreamGroup::verified_locked(const NcclOperation& op) const {
  return op.signature.empty() || verifier_.verified(op.sequence);
}

void StreamGroup::on_op_signature(const ControlMessage& message) noexcept {
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

void StreamGroup::throw_failure(const Operation& op) {
  const bool stopped = comm_.wait_stopped(static_cast<const NcclOperation&>(op).event);
  Failure failure = failure_.get();
  if (!stopped) failure.cause += " (and the device has not stopped: its memory may still change)";
  comm::throw_failure(failure);
}

}  // namespace tessera::comm::nccl
