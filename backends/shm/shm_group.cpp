#include "backends/shm/shm_group.h"

#include <algorithm>
#include <atomic>

#include "tessera/base/error.h"
#include "tessera/comm/core/op_traits.h"
#include "tessera/comm/kernels/reduce.h"

namespace tessera::comm::shm {

ShmGroup::ShmGroup(std::shared_ptr<ShmRuntime> runtime, int rank, std::vector<int> members,
                   std::shared_ptr<MemoryTracker> memory_tracker)
    : PolledGroup(runtime->engine(), {runtime, &runtime->options()}, rank, std::move(members)),
      runtime_(std::move(runtime)),
      blocks_(*runtime_, rank, this->members(), std::move(memory_tracker), traffic_),
      buffers_(blocks_),
      announcements_(blocks_, buffers_),
      tiled_(blocks_, buffers_),
      messages_(*this, blocks_),
      monitor_(blocks_),
      sources_(this->members().size()),
      factors_(sources_.size()) {}

ShmGroup::~ShmGroup() {
  ShmRuntime::RetiredBlock retired = blocks_.retire();
  buffers_.retire(retired);
  messages_.retire(retired);
  runtime_->retire(std::move(retired));
}

ShmOperation& ShmGroup::prepare(const OpDesc& call, bool internal) {
  throw_if_failed();
  if (is_message(call.kind)) {
    last_algorithm_ = kDirect;
    return prepare_message(call, internal);
  }
  const bool symmetric = uses_symmetric(call);
  if (!internal) last_algorithm_ = symmetric ? kSymmetric : kDirect;
  ShmOperation& op = acquire<ShmOperation>(blocks_);
  if (size() == 1) {
    op.reset(call, 0);
    run_eager(op);
    op.state.store(Operation::succeeded);
    return op;
  }
  op.reset(call, ++sequence_, symmetric);
  op.internal = internal;
  select_protocol(op);
  if (op.eager) announcements_.prefetch(op);
  return op;
}

ShmOperation& ShmGroup::prepare_message(const OpDesc& call, bool internal) {
  ShmOperation& op = acquire<ShmOperation>(blocks_);
  op.reset(call, 0);
  op.internal = internal;
  return op;
}

bool ShmGroup::uses_symmetric(const OpDesc& call) const {
  if (size() == 1) return false;
  const std::size_t bytes = std::max(call.in.bytes(), call.out.bytes());
  const std::string_view named = runtime_->algorithms().choose(call.kind, bytes);
  if (named == kSymmetric && bytes > kEagerBytes)
    throw InvalidUsage("all_reduce: algorithm symmetric supports at most " + std::to_string(kEagerBytes) +
                       " bytes, not " + std::to_string(bytes) + "; see TESSERA_ALGO");
  return call.kind == OpKind::all_reduce && named != kDirect && bytes <= kEagerBytes;
}

void ShmGroup::select_protocol(ShmOperation& op) const {
  const OpDesc& call = op.call;
  op.small = std::max(call.in.bytes(), call.out.bytes()) <= kSmallBytes;
  op.eager = op.layout.eager_size() <= kEagerBytes && (call.kind != OpKind::all_reduce || op.layout.symmetric());
  op.everyone = !op.eager || !has_root(call.kind) || options().check;
  op.fingerprint = op.layout.fingerprint(call.op);
  if (options().check) op.fingerprint ^= std::hash<std::string_view>{}(call.label);
}

Work ShmGroup::start_batch(std::span<const OpDesc> parts, bool internal) {
  if (parts.empty()) look_for_failure();
  throw_if_failed();
  if (parts.empty()) return {};
  if (!internal) last_algorithm_ = kDirect;
  return launch_batch(prepare_message(parts.front(), internal), parts,
                      [&](const OpDesc& part) -> Operation& { return prepare_message(part, internal); });
}

Buffer ShmGroup::allocate_scratch(std::size_t bytes) const {
  return runtime_->arena().allocate(bytes, MemoryCategory::other, nullptr);
}

void ShmGroup::read_traffic(TrafficStats& stats) const {
  PolledGroup::read_traffic(stats);
  blocks_.read_traffic(stats);
}

bool ShmGroup::accept_submitted() noexcept {
  OperationQueue<Operation> submitted = take_submitted();
  if (submitted.empty()) return false;
  while (!submitted.empty()) {
    auto& op = static_cast<ShmOperation&>(submitted.pop());
    if (op.is_message())
      messages_.push(op);
    else
      collectives_.push(op);
  }
  return true;
}

bool ShmGroup::poll(bool with_health_check) noexcept {
  if (!any_in_flight()) return false;  // a moment ago there was
  bool moved = accept_submitted();
  const ShmOperation* current = nullptr;
  try {
    if (failed()) {
      fail({}, false);  // what was submitted since the failure
      return true;
    }
    if (with_health_check && check_health()) return true;
    if (!collectives_.empty()) {
      current = collectives_.front();
      moved |= advance_first();
      current = nullptr;
    }
    if (messages_.any()) moved |= messages_.advance();
  } catch (const Mismatch& error) {
    fail({FailureKind::mismatch, error.what()}, true);
    return true;
  } catch (const std::exception& error) {
    // Memory of a peer that failed can become unreadable: then the peer's failure is the cause, not this error.
    if (!adopt_peer_failure())
      fail({FailureKind::system, (current != nullptr ? current->format() + ": " : "") + error.what()}, true);
    return true;
  }
  return moved;
}

/// Advances the first queued collective by one step, or by many if it is small.
bool ShmGroup::advance_first() {
  constexpr int kMaxSteps = 64;  // bounded, so that deadlines are checked
  ShmOperation& op = *collectives_.front();
  for (int step = 0; step < kMaxSteps; ++step) {
    if (!advance_collective(op)) return step > 0;
    if (collectives_.front() != &op || !op.small) break;
  }
  return true;
}

bool ShmGroup::advance_collective(ShmOperation& op) {
  using Stage = ShmOperation::Stage;
  if (op.stage == Stage::queued) {
    if (!announcements_.has_room(op)) return false;
    announcements_.publish(op);
    return true;
  }
  bool moved = false;
  if (op.stage == Stage::announced) {
    moved = announcements_.read(op);
    if (op.stage == Stage::announced) return (!op.eager && tiled_.prepare(op)) || moved;
    if (!op.eager) tiled_.begin(op);
  }
  if (op.eager)
    run_eager(op);
  else if (moved |= tiled_.advance(op); op.stage != Stage::done)
    return moved;
  // A peer may have failed after its call. Its buffer is its caller's again, who may have written into what this rank
  // read, and the failure is to reach this call even if the peer's part of it had arrived.
  if (adopt_peer_failure()) return true;
  complete(collectives_.pop(), Operation::succeeded);
  return true;
}

/// The eager algorithm for small collectives: the announcement carries the payload, so one exchange suffices. Reduces
/// or copies the payloads of all ranks that `op` awaits, which have arrived.
void ShmGroup::run_eager(const ShmOperation& op) {
  const OpDesc& call = op.call;
  if (call.kind == OpKind::barrier) return;
  const std::size_t element = size_of(call.in.dtype);
  for (int k = 0; k < size(); ++k) blocks_.count_sent(op, k, op.layout.sent_slice(k).count * element);
  const auto payload = [&](int k) {
    return k == rank() ? static_cast<const std::byte*>(call.in.data)
                       : static_cast<const std::byte*>(blocks_.of(k).slot(op.sequence).payload);
  };
  auto* out = static_cast<std::byte*>(call.out.data);
  if (op.layout.reduces()) {
    const Slice whole = op.layout.read_slice(rank());
    if (whole.count == 0) return;
    for (int k = 0; k < size(); ++k) sources_[static_cast<std::size_t>(k)] = payload(k) + whole.offset * element;
    blocks_.read_factors(op, factors_);
    reduce_tree(call.op, call.in.dtype, sources_, factors_, out + op.layout.output_offset(rank()) * element,
                whole.count);
    return;
  }
  for (int k = 0; k < size(); ++k) {
    const Slice whole = op.layout.read_slice(k);
    if (whole.count == 0) continue;
    copy_bytes(out + op.layout.output_offset(k) * element, payload(k) + whole.offset * element, whole.count * element,
               false);
  }
}

bool ShmGroup::adopt_peer_failure() noexcept {
  std::atomic_thread_fence(std::memory_order_acquire);  // what this rank has read was read before
  if (!monitor_.any_failure()) return false;
  std::optional<Failure> failure = monitor_.published_failure();
  if (failure) fail(std::move(*failure), true);
  return failure.has_value();
}

void ShmGroup::send_failure(const Failure& failure) noexcept {
  runtime_->arena().quarantine();
  runtime_->staging().quarantine();
  monitor_.publish(failure);
}

void ShmGroup::fail_operations(bool) noexcept {
  while (!collectives_.empty()) complete(collectives_.pop(), Operation::failed);
  messages_.fail_all();
}

/// Without an operation in flight nothing else does.
void ShmGroup::look_for_failure() noexcept {
  const std::lock_guard lock(engine().mutex());
  if (failed() || adopt_peer_failure()) return;
  for (int k = 0; k < size() && !failed(); ++k)
    if (const std::string death = k == rank() ? "" : monitor_.death(k); !death.empty())
      fail({FailureKind::peer_lost, rank_name(k) + " " + death}, true);
}

/// Checks the deadlines and the peers. True: the communicator has failed.
bool ShmGroup::check_health() noexcept {
  if (adopt_peer_failure()) return true;
  const auto check_first = [this](const OperationQueue<ShmOperation>& queue) {
    if (!failed() && !queue.empty()) check_peers(*queue.front());
  };
  check_first(collectives_);
  messages_.for_each_queue(check_first);
  const auto check_deadlines = [this, now = Clock::now()](const OperationQueue<ShmOperation>& queue) {
    if (failed()) return;
    for (const ShmOperation* op = queue.front(); op != nullptr; op = queue.after(*op))
      if (op->is_late(now))  // the first collective delays the others
        return fail_with_timeout(op->is_message() ? *op : *queue.front());
  };
  check_deadlines(collectives_);
  messages_.for_each_queue(check_deadlines);
  return failed();
}

void ShmGroup::check_peers(const ShmOperation& op) noexcept {
  const bool any = op.is_message() && op.call.root == kAnyRank;
  int left = 0;
  for (int k = 0; k < size(); ++k) {
    if (k == rank() || (op.is_message() && !any && k != op.call.root)) continue;
    if (const std::string death = monitor_.death(k); !death.empty())
      return fail({FailureKind::peer_lost, op.format() + ": " + rank_name(k) + " " + death}, true);
    if (!monitor_.has_left(k)) continue;
    if (any && ++left < size() - 1) continue;  // another one may still send
    if (op.is_message() ? messages_.awaits_peer(op, k) : announcements_.last(k) < op.sequence)
      return fail({FailureKind::peer_lost,
                   op.format() + ": " + describe_leaving(rank_name(k), monitor_.first_failure_cause(k))},
                  true);
  }
}

void ShmGroup::fail_with_timeout(const ShmOperation& op) noexcept {
  const std::vector<bool> responds = monitor_.ping_all();
  if (adopt_peer_failure()) return;  // another rank may have published the cause during the pings
  // Before its announcement, an operation waits until all ranks are done with the one whose slot it reuses.
  const bool queued = !op.is_message() && op.stage == ShmOperation::Stage::queued;
  std::vector<MemberProgress> replies;
  for (int k = 0; k < size(); ++k) {
    const bool other = op.call.root != kAnyRank && k != op.call.root;
    if (k == rank() || (op.is_message() ? other : !queued && !op.awaits(k))) continue;
    replies.push_back({k, {}});
    if (responds[static_cast<std::size_t>(k)]) replies.back().called = announcements_.last(k);
  }
  const std::string delay = describe_delay(op, queued ? op.sequence - 1 : op.sequence, replies, kUnderWay);
  fail({FailureKind::timeout, timeout_message(op, delay)}, true);
}

}  // namespace tessera::comm::shm
