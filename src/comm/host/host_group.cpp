#include "tessera/comm/host/host_group.h"

#include <algorithm>

#include "tessera/comm/core/op_traits.h"

namespace tessera::comm::host {

HostGroup::HostGroup(std::shared_ptr<HostRuntime> runtime, std::uint32_t id, int rank, std::vector<int> members)
    : PolledGroup(runtime->engine(), {runtime, &runtime->options()}, rank, std::move(members)),
      runtime_(std::move(runtime)),
      id_(id),
      schedules_(*runtime_, this->rank(), size()),
      messages_to_(this->members().size()),
      messages_from_(this->members().size()),
      verifier_(this->members().size()) {}

HostGroup::~HostGroup() {
  // Don't reuse a number whose messages may still be in flight.
  if (!failed()) runtime_->ids().release(id_);
}

void HostGroup::use_native(std::unique_ptr<NativeCommunicator> group) noexcept {
  native_ = std::move(group);
  schedules_.set_native(native_ != nullptr ? ScheduleCache::Native::available : ScheduleCache::Native::exhausted);
  if (native_ == nullptr)
    log(LogLevel::info, runtime_->capabilities().backend + ": the library has no more communicators; one of " +
                            std::to_string(size()) + " ranks does not use native");
}

void HostGroup::open() {
  const std::lock_guard lock(engine().mutex());
  runtime_->add(*this);
}

void HostGroup::close() noexcept {
  finish_operations();
  const std::lock_guard lock(engine().mutex());
  runtime_->remove(*this);
  if (native_ != nullptr && failed()) native_->abandon();
  native_.reset();
}

ScheduleExecutor& HostGroup::prepare(const OpDesc& call, bool internal) {
  if (runtime_->has_messages()) engine().try_poll(false);
  throw_if_failed();
  if (is_message(call.kind)) {
    last_algorithm_ = kMessageAlgorithm;
    return prepare_message(call, internal);
  }
  // May throw: before anything is counted.
  std::shared_ptr<const Schedule> schedule = internal ? schedules_.make_default(call) : schedules_.find(call);
  if (!internal) last_algorithm_ = schedule->algorithm;
  ScheduleExecutor& op = prepare_collective(call, std::move(schedule));
  op.internal = internal;
  if (options().check && !internal) op.signature = checked_signature(call, size());
  return op;
}

ScheduleExecutor& HostGroup::prepare_message(const OpDesc& call, bool internal) {
  auto& numbers = call.kind == OpKind::send ? messages_to_ : messages_from_;
  ScheduleExecutor& op = acquire<ScheduleExecutor>(*this);
  op.reset(call, call.root == kAnyRank ? 0 : numbers.next(call.root, call.tag));
  op.internal = internal;
  return op;
}

ScheduleExecutor& HostGroup::prepare_collective(const OpDesc& call, std::shared_ptr<const Schedule> schedule) {
  const bool native = schedule->algorithm == kNativeAlgorithm && !schedule->steps.empty();
  ScheduleExecutor& op = acquire<ScheduleExecutor>(*this);
  op.reset(call, called_->fetch_add(1) + 1);
  op.set_schedule(std::move(schedule));
  if (native) op.native_position = ++native_called_;
  return op;
}

Work HostGroup::start_copy(std::unique_ptr<NativeCommunicator>& copy) {
  throw_if_failed();
  const OpDesc call{.kind = OpKind::barrier, .timeout = timeout(), .label = "split"};
  ScheduleExecutor& op = prepare_collective(call, schedules_.make_native(call));
  op.copy = &copy;
  op.internal = true;
  return launch(op);
}

Work HostGroup::start_batch(std::span<const OpDesc> parts, bool internal) {
  if (runtime_->has_messages()) engine().try_poll(false);
  if (parts.empty()) look_for_failure();
  throw_if_failed();
  if (parts.empty()) return {};
  if (!internal) last_algorithm_ = kMessageAlgorithm;
  ScheduleExecutor& batch = acquire<ScheduleExecutor>(*this);
  batch.reset(OpDesc{.timeout = parts.front().timeout, .label = parts.front().label}, 0);
  return launch_batch(batch, parts, [&](const OpDesc& part) -> Operation& { return prepare_message(part, internal); });
}

Buffer HostGroup::allocate_scratch(std::size_t bytes) const {
  return runtime_->unbooked_memory().allocate(bytes, MemoryCategory::other);
}

bool HostGroup::begin_submitted() noexcept {
  OperationQueue<Operation> submitted = take_submitted();
  if (submitted.empty()) return false;
  while (!submitted.empty()) {
    auto& op = static_cast<ScheduleExecutor&>(submitted.pop());
    if (failed()) {
      PolledGroup::complete(op, Operation::failed);
      continue;
    }
    running_.push_back(&op);
    if (op.awaits_sender()) {
      await_sender_.push_back(&op);
      continue;
    }
    op.verified = op.signature.empty();
    op.begin();
    if (!op.verified) {
      send_signature(op);  // may complete it, if the others have called it and it has no steps
    } else if (!op.ready()) {
      complete_if_done(op);  // it has no steps
    }
  }
  return true;
}

/// Begins a receive from any rank if its message has come.
bool HostGroup::find_sender(ScheduleExecutor& op) noexcept {
  for (int k = 0; k < size(); ++k) {
    if (k == rank()) continue;
    const std::uint64_t number = messages_from_.peek(k, op.call.tag);
    if (!runtime_->transport().arrived(world_rank(k), op.message_tag(number)) ||
        !messages_from_.take(k, op.call.tag, number))
      continue;
    op.set_sender(k, number);
    op.begin();
    return true;
  }
  return false;
}

bool HostGroup::find_senders() noexcept {
  return std::erase_if(await_sender_, [this](ScheduleExecutor* op) { return find_sender(*op); }) > 0;
}

void HostGroup::complete_if_done(ScheduleExecutor& op) noexcept {
  if (op.surprise_peer >= 0 && op.verified)  // else the signatures are being exchanged, which give more information
    return fail({FailureKind::mismatch, op.format() + ": rank " + std::to_string(op.surprise_peer) + " sent " +
                                            std::to_string(op.surprise) +
                                            " bytes where another number was expected: the ranks called different "
                                            "operations (TESSERA_CHECK=1 shows which)"},
                true);
  if (op.complete() && op.verified) complete(op, Operation::succeeded);
}

void HostGroup::complete(ScheduleExecutor& op, Operation::State state) noexcept {
  running_.erase(std::ranges::find(running_, &op));
  runtime_->remove_runnable(op);
  PolledGroup::complete(op, state);
}

std::atomic<std::uint64_t>* HostGroup::counter(const ScheduleExecutor& op, int member) noexcept {
  return op.internal ? nullptr : &traffic_.counter(op.call.kind, member);
}

bool HostGroup::begin_native_in_order(const ScheduleExecutor& op) noexcept {
  if (!op.verified || op.native_position != native_begun_ + 1) return false;
  ++native_begun_;
  return true;
}

/// The library can't report what it sent.
void HostGroup::count_native(const ScheduleExecutor& op) noexcept {
  if (op.internal) return;
  const OpDesc& call = op.call;
  const std::size_t count = larger_count(call, size());
  for (int k = 0; k < size(); ++k)
    traffic_.add(call.kind, k,
                 direct_bytes_to(call.kind, count, size_of(call.out.dtype),
                                 {.ranks = size(), .rank = rank(), .peer = k, .root = call.root}));
}

void HostGroup::send_failure(const Failure& failure) noexcept {
  runtime_->monitor().send(members(), {.kind = ControlMessage::Kind::failure,
                                       .communicator = id_,
                                       .number = static_cast<std::uint64_t>(failure.kind),
                                       .text = failure.cause});
}

/// Once their messages are cancelled, nothing writes the callers' memory any more.
void HostGroup::fail_operations(bool first) noexcept {
  verifier_.clear();
  await_sender_.clear();
  for (ScheduleExecutor* op : running_) op->cancel();
  while (!running_.empty()) complete(*running_.back(), Operation::failed);
  if (first) runtime_->transport().discard_communicator(id_);
  if (first && failure_.get().kind == FailureKind::timeout) runtime_->on_timeout();
  runtime_->update_transport_polling();
}

void HostGroup::send_signature(ScheduleExecutor& op) noexcept {
  const ControlMessage message{.kind = ControlMessage::Kind::op_signature,
                               .communicator = id_,
                               .number = op.sequence,
                               .value = CallVerifier::fingerprint(op.signature),
                               .text = op.signature};
  runtime_->monitor().send(members(), message);
  on_op_signature(rank(), message);
}

void HostGroup::on_op_signature(int member, const ControlMessage& message) noexcept {
  const std::uint64_t sequence = message.number;
  if (failed() || !verifier_.submit(member, sequence, message.text, message.value)) return;
  if (!verifier_.verified(sequence))
    return fail({FailureKind::mismatch, verifier_.mismatch(sequence, [this](int k) { return rank_name(k); })}, true);
  verifier_.erase(sequence);
  const auto found = std::ranges::find_if(
      running_, [&](const ScheduleExecutor* op) { return !op->signature.empty() && op->sequence == sequence; });
  if (found == running_.end()) return;
  (*found)->verified = true;
  complete_if_done(**found);
}

/// Why this operation can't complete any more, or "".
std::string HostGroup::problem_of(const ScheduleExecutor& op) const {
  int gone = 0;
  for (int k = 0; k < size(); ++k) {
    if (k == rank()) continue;
    const PeerStatus& peer = runtime_->peer(world_rank(k));
    if (!peer.left && !peer.died && !peer.disconnected) continue;
    if (op.awaits_sender()) {
      ++gone;
      if (!peer.died && gone < size() - 1) continue;  // another one may still send
    } else if (!op.needs(k)) {
      continue;
    }
    if (peer.died) return rank_name(k) + " died";
    // Messages sent before it left may still be in flight: wait until the connection ends or has been quiet for a
    // while.
    const bool quiet = Clock::now() - std::max(peer.since, runtime_->last_moved()) > kVerdictTime;
    if (peer.left && (peer.disconnected || quiet)) return describe_leaving(rank_name(k), peer.why);
    if (!peer.left && quiet && runtime_->would_know_departure(world_rank(k)))
      return "the connection to " + rank_name(k) + " is lost: " + peer.why;
  }
  return {};
}

/// Of a peer, also while no operation waits for it.
void HostGroup::look_for_failure() noexcept {
  const std::lock_guard lock(engine().mutex());
  runtime_->handle_messages();
  for (int k = 0; k < size() && !failed(); ++k)
    if (k != rank() && runtime_->peer(world_rank(k)).died) fail({FailureKind::peer_lost, rank_name(k) + " died"}, true);
}

void HostGroup::check_health() noexcept {
  for (const ScheduleExecutor* op : running_)
    if (const std::string problem = problem_of(*op); !problem.empty())
      return fail({FailureKind::peer_lost, op->format() + ": " + problem}, true);
  const Clock::time_point now = Clock::now();
  for (const ScheduleExecutor* op : running_)
    if (op->is_late(now)) return fail_with_timeout(*op);
}

void HostGroup::fail_with_timeout(const ScheduleExecutor& op) noexcept {
  const std::vector<std::optional<std::uint64_t>> replies = runtime_->monitor().query_progress(id_, members());
  runtime_->handle_messages();  // the cause may have arrived meanwhile
  if (failed()) return;
  fail({FailureKind::timeout, timeout_message(op, describe_replies(op, replies))}, true);
}

/// The ranks that delay the operation. Of a rank behind one that does not reply nothing is known: it is not named.
std::string HostGroup::describe_replies(const ScheduleExecutor& op,
                                        std::span<const std::optional<std::uint64_t>> by_world_rank) const {
  std::vector<MemberProgress> replies;
  bool any = false;
  int silent = -1;  // forwards for others, and does not reply
  for (int k = 0; k < size(); ++k) {
    if (k == rank()) continue;
    const auto& called = by_world_rank[static_cast<std::size_t>(world_rank(k))];
    any = any || called.has_value();
    if (op.is_message() && k != op.call.root && !op.awaits_sender()) continue;
    const int forwarder = called ? -1 : runtime_->monitor().silent_forwarder(world_rank(k), by_world_rank);
    if (forwarder < 0) replies.push_back({k, called});
    if (silent < 0) silent = forwarder;
  }
  if (!any && silent < 0 && size() > 2 && !op.is_message())
    return "none of the other " + std::to_string(size() - 1) + " ranks is responding: this one may be cut off";
  const std::string delay = describe_delay(op, op.sequence, replies, silent < 0 ? kUnderWay : "");
  if (silent < 0) return delay;
  const std::string forwarder = runtime_->describe_forwarder(silent, *this);
  if (!any || delay.empty()) return forwarder;
  return member_of(silent) < 0 ? delay + "; " + forwarder : delay;  // a member is among the replies
}

}  // namespace tessera::comm::host
