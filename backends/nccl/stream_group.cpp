#include "backends/nccl/stream_group.h"

#include <algorithm>
#include <iterator>

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

void Family::add(StreamGroup& group) {
  const std::lock_guard lock(mutex_);
  groups_.push_back(&group);
}

void Family::remove(StreamGroup& group) noexcept {
  const std::lock_guard lock(mutex_);
  std::erase(groups_, &group);
}

/// [Note: order of an abort] An abort ends the kernels of the whole family, whose operations then look complete. So all
/// groups have failed before the first abort.
void Family::fail(StreamGroup& first, const Failure& failure, bool notify) noexcept {
  const std::lock_guard lock(mutex_);
  std::vector<StreamGroup*> all{&first};
  std::copy_if(groups_.begin(), groups_.end(), std::back_inserter(all), [&](auto* group) { return group != &first; });
  std::vector<std::vector<NcclOperation*>> ended(all.size());
  std::vector<bool> fails(all.size());
  std::vector<NcclComm*> comms;
  for (std::size_t i = 0; i < all.size(); ++i) {
    fails[i] = all[i]->mark_failed(failure, ended[i]);
    if (fails[i]) comms.push_back(&all[i]->comm_);
  }
  NcclComm::abort(comms);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (fails[i]) all[i]->publish_failure(notify || i > 0);
    all[i]->release_operations(ended[i]);
  }
}

StreamGroup::StreamGroup(std::shared_ptr<NcclRuntime> runtime, std::uint64_t id, std::shared_ptr<Family> family)
    : GroupCore({runtime, &runtime->options()}, 0, {}),
      runtime_(std::move(runtime)),
      api_(runtime_->api()),
      comm_(api_, runtime_->device()),
      family_(family != nullptr ? std::move(family) : std::make_shared<Family>()),
      id_(id) {}

StreamGroup::~StreamGroup() {
  if (stream_ == nullptr) return;
  if (failed()) wait_stopped();
  if (runtime_->abandoned().any()) runtime_->abandoned().keep(std::move(stream_));
}

bool StreamGroup::wait_stopped() noexcept {
  if (stream_ == nullptr) return comm_.wait_aborted();
  const DeviceGuard guard(api_, runtime_->device(), std::nothrow);
  const bool aborted = comm_.wait_aborted();
  if (aborted) std::call_once(end_recorded_, [this] { stream_->record_end(); });
  const bool stopped = aborted && comm_.wait_stopped(stream_->end());
  if (!stopped) runtime_->abandoned().add(stream_, !aborted);
  return stopped;
}

void StreamGroup::enter_members(int rank, std::vector<int> members) {
  closed_.resize(members.size());
  has_begun_.assign(members.size(), true);
  verifier_ = CallVerifier(members.size());
  set_members(rank, std::move(members));
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

std::shared_ptr<const CallThreads::Call> StreamGroup::start_call(std::function<void()> call) {
  return runtime_->calls().start([self = shared_from_this(), call = std::move(call)] { call(); });
}

/// Why a call that has ended failed; empty if it did not.
std::string StreamGroup::error_of(const CallThreads::Call& call) noexcept {
  try {
    call.rethrow();
    return "";
  } catch (const NcclError& error) {
    // A dead peer may be the cause: the control channel names it within the time that health() allows.
    if (error.result == ncclRemoteError || error.result == ncclSystemError) {
      const Clock::time_point until = Clock::now() + NcclComm::kVerdictTime;
      for (Backoff pause; !failed() && Clock::now() < until; pause(1ms)) retire_completed();
    }
    return comm_.format(error);
  } catch (const std::exception& error) {
    return error.what();
  }
}

void StreamGroup::run_call(std::function<void()> call, Clock::time_point until) {
  const auto running = start_call(std::move(call));
  for (Backoff pause; !running->done(); pause(1ms)) {
    throw_if_failed();
    if (Clock::now() >= until) throw Timeout("nccl: not ready in time");
  }
  if (const std::string problem = error_of(*running); !problem.empty()) throw BackendError(problem);
}

/// Runs in one of the CallThreads.
void StreamGroup::enqueue(NcclOperation& op, const Issue& issue, const Issue& and_then) {
  stream_->begin_operation();
  comm_.use(issue);
  if (and_then) comm_.use(and_then);
  op.event.record(stream_->get());
  const std::lock_guard lock(mutex_);
  op.recorded = true;
}

Work StreamGroup::launch(NcclOperation& op, Issue issue, Issue and_then) {
  op.group = shared_from_this();
  const WorkRef hold(op);
  throw_if_failed();
  if (!op.signature.empty())
    send_signature(op);  // before the call: NCCL may hang if the ranks call different operations
  {
    const std::lock_guard lock(mutex_);
    throw_if_failed();
    op.retain();
    in_flight_.push_back(&op);
  }
  runtime_->begin_operation();
  std::string problem;
  try {
    const auto running = start_call([this, hold, issue = std::move(issue), and_then = std::move(and_then)] {
      enqueue(static_cast<NcclOperation&>(*hold), issue, and_then);
    });
    for (Backoff pause; !running->done() && !failed(); pause(1ms))
      if (op.is_late(Clock::now())) fail_with_timeout(op);
    if (running->done()) problem = error_of(*running);
  } catch (const SystemError& error) {
    problem = error.what();
  }
  if (!problem.empty()) fail({FailureKind::backend, op.format() + ": " + problem}, true);
  if (failed()) throw_failure(op);
  return Work(&op);
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
  const auto op = std::ranges::find_if(in_flight_, [](const auto* one) { return one->sequence != 0; });
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
  std::optional<DeviceGuard> guard;  // any thread comes here: the program's, the control channel's, the watching one
  if (!in_flight_.empty()) guard.emplace(api_, runtime_->device(), std::nothrow);
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
    if (!comm_.usable()) return;
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
    if (std::ranges::none_of(in_flight_, is_late)) return;
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
  for (int k = 0; k < size(); ++k) {
    if (k == rank() || (op.is_message() && k != op.call.root)) continue;
    MemberProgress one{k, called[static_cast<std::size_t>(world_rank(k))]};
    // Of a rank behind one that does not reply nothing is known: the latter is named.
    const int silent = one.called ? -1 : runtime_->monitor().silent_forwarder(world_rank(k), called);
    if (silent >= 0 && member_of(silent) >= 0) one.member = member_of(silent);
    if (std::ranges::find(replies, one.member, &MemberProgress::member) == replies.end()) replies.push_back(one);
  }
  const std::string delay = describe_delay(op, op.sequence, replies, "all ranks respond, and it is still under way");
  fail({FailureKind::timeout, timeout_message(op, delay)}, true);
}

/// False: it had failed before. What completed before the failure has not failed.
bool StreamGroup::mark_failed(const Failure& failure, std::vector<NcclOperation*>& ended) noexcept {
  const std::lock_guard lock(mutex_);
  if (failed()) return false;
  Failure ignored;
  if (comm_.usable()) retire_locked(ended, ignored);
  failure_.set(failure);
  for (NcclOperation* op : in_flight_) op->state.store(Operation::failed);
  ended.insert(ended.end(), in_flight_.begin(), in_flight_.end());
  in_flight_.clear();
  verifier_.clear();
  return true;
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

bool StreamGroup::has_closed(int member) const noexcept {
  const std::lock_guard lock(mutex_);
  return closed_[static_cast<std::size_t>(member)].has_value();
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

void StreamGroup::throw_failure(const Operation&) {
  const bool stopped = wait_stopped();
  Failure failure = failure_.get();
  if (!stopped) failure.cause += " (and the device has not stopped: its memory may still change)";
  comm::throw_failure(failure);
}

}  // namespace tessera::comm::nccl
