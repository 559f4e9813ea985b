#include "tessera/comm/host/host_group.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/core/format.h"

namespace tessera::comm::host {
namespace {

/// Up to this size an operation may complete inside its call.
constexpr std::size_t kSmallBytes = std::size_t{1} << 20;
constexpr std::size_t kKeepScratchBytes = 1 << 20;

}  // namespace

HostGroup::HostGroup(std::shared_ptr<HostRuntime> world, std::uint32_t number, int rank, std::vector<int> members,
                     CommunicatorOptions options)
    : world_(std::move(world)),
      number_(number),
      rank_(rank),
      members_(std::move(members)),
      options_(std::move(options)),
      sent_(kOpKinds * members_.size()),
      called_(std::make_shared<std::atomic<std::uint64_t>>(0)),
      messages_to_(members_.size()),
      messages_from_(members_.size()) {}

HostGroup::~HostGroup() {
  // Don't reuse a number whose messages may still be in flight.
  if (!failed_.load()) world_->give_back(number_);
}

void HostGroup::use_native(std::unique_ptr<NativeCommunicator> group) noexcept {
  native_ = std::move(group);
  native_used_up_ = native_ == nullptr;
  if (native_used_up_ && options_.logger != nullptr)
    options_.logger->write(LogLevel::info, world_->capabilities().backend +
                                               ": the library has no more communicators; " + "one of " +
                                               std::to_string(size()) + " ranks goes without native");
}

void HostGroup::open() {
  const std::lock_guard lock(world_->engine().mutex());
  world_->add(*this);
}

void HostGroup::close() noexcept {
  // Terminates: every operation fails at its deadline.
  while (!world_->engine().wait(idle_, Clock::now() + std::chrono::hours(1))) {
  }
  const std::lock_guard lock(world_->engine().mutex());
  world_->remove(*this);
  if (native_ != nullptr && failed_.load()) native_->abandon();
  native_.reset();
}

int HostGroup::member_of(int world_rank) const noexcept {
  const auto found = std::find(members_.begin(), members_.end(), world_rank);
  return found == members_.end() ? -1 : static_cast<int>(found - members_.begin());
}

ScheduleExecutor& HostGroup::acquire() {
  const std::lock_guard lock(submit_mutex_);
  if (free_ops_.empty()) {
    all_ops_.push_back(std::make_unique<ScheduleExecutor>());
    free_ops_.reserve(all_ops_.size());
    submitted_.reserve(all_ops_.size());
    return *all_ops_.back();
  }
  ScheduleExecutor& op = *free_ops_.back();
  free_ops_.pop_back();
  return op;
}

void HostGroup::put_back(ScheduleExecutor& op) noexcept {
  op.rest(kKeepScratchBytes);
  const std::lock_guard lock(submit_mutex_);
  free_ops_.push_back(&op);
}

Work HostGroup::start(const OpDesc& call, bool internal) {
  if (world_->has_heard()) world_->engine().try_poll(false);
  if (failed_.load()) throw_failure();
  const bool message = call.kind == OpKind::send || call.kind == OpKind::recv;
  std::shared_ptr<const Schedule> schedule;
  if (internal) {  // regardless of TESSERA_ALGO
    const CollectiveSpec problem = problem_of(call);
    schedule = std::make_shared<const Schedule>(build_schedule(problem, default_algorithm(problem)));
  } else if (!message) {
    schedule = schedule_for(call);  // may throw: before anything is counted
  }
  if (!internal) last_algorithm_ = message ? kMessageAlgorithm : schedule->algorithm;
  ScheduleExecutor& op = acquire();
  const WorkRef hold(op);
  if (message) {
    auto& numbers = call.kind == OpKind::send ? messages_to_ : messages_from_;
    op.prepare(shared_from_this(), call, ++numbers[static_cast<std::size_t>(call.root)]);
  } else {
    const bool native = schedule->algorithm == kNativeAlgorithm && !schedule->steps.empty();
    op.prepare(shared_from_this(), call, ++sequence_);
    op.take(std::move(schedule));
    if (native) op.turn = ++native_called_;
    called_->store(sequence_);
    if (world_->options().check && !internal) op.called = checked_signature(call, size());
  }
  op.internal = internal;
  submit(op);
  return launch(op);
}

Work HostGroup::start_copy(std::unique_ptr<NativeCommunicator>& copy) {
  if (failed_.load()) throw_failure();
  const OpDesc call{.kind = OpKind::barrier, .timeout = options_.timeout, .label = "split"};
  ScheduleExecutor& op = acquire();
  const WorkRef hold(op);
  op.prepare(shared_from_this(), call, ++sequence_);
  op.take(std::make_shared<const Schedule>(build_native_schedule(problem_of(call))));
  op.turn = ++native_called_;
  op.copy = &copy;
  op.internal = true;
  called_->store(sequence_);
  submit(op);
  return launch(op);
}

Work HostGroup::start_batch(std::span<const OpDesc> parts) {
  if (world_->has_heard()) world_->engine().try_poll(false);
  if (failed_.load()) throw_failure();
  if (parts.empty()) return {};
  last_algorithm_ = kMessageAlgorithm;
  ScheduleExecutor& whole = acquire();
  whole.prepare(shared_from_this(), OpDesc{.timeout = parts.front().timeout, .label = parts.front().label}, 0);
  whole.parts_left = static_cast<std::uint32_t>(parts.size());
  Work work(&whole);
  for (const OpDesc& part : parts) {
    ScheduleExecutor& op = acquire();
    auto& numbers = part.kind == OpKind::send ? messages_to_ : messages_from_;
    op.prepare(shared_from_this(), part, ++numbers[static_cast<std::size_t>(part.root)]);
    op.parent = &whole;
    submit(op);
  }
  world_->engine().try_poll(false);
  world_->engine().wake_waiters();
  world_->engine().wake_progress_thread();
  return work;
}

void HostGroup::submit(ScheduleExecutor& op) noexcept {
  op.retain();  // until finish()
  if (op.parent != nullptr) op.parent->retain();
  world_->engine().begin_operation();
  const std::lock_guard lock(submit_mutex_);
  if (in_flight_.fetch_add(1) == 0) idle_.store(0);
  submitted_.push_back(&op);
}

Work HostGroup::launch(ScheduleExecutor& op) {
  ProgressEngine& engine = world_->engine();
  engine.try_poll(false);
  if (op.call.in.bytes() <= kSmallBytes && op.call.out.bytes() <= kSmallBytes) engine.spin_for_completion(op.finished);
  if (op.succeeded()) return {};
  engine.wake_waiters();  // the thread that holds the lock may have looked before the submission
  engine.wake_progress_thread_if_idle();
  return Work(&op);
}

bool HostGroup::submitted() noexcept {
  if (in_flight_.load() == running_.size()) return false;
  fresh_.clear();
  {
    const std::lock_guard lock(submit_mutex_);
    fresh_.swap(submitted_);
    submitted_.reserve(all_ops_.size());
    running_.reserve(all_ops_.size());
  }
  const std::span<ScheduleExecutor* const> fresh(fresh_);
  running_.insert(running_.end(), fresh.begin(), fresh.end());
  if (failed_.load()) {
    fail({}, false);
    return true;
  }
  for (ScheduleExecutor* op : fresh) {
    op->agreed = op->called.empty();
    op->begin();
    if (!op->called.empty()) {
      announce(*op);  // may end it, if the others have called it and it has no steps
    } else if (!op->ready()) {
      settle(*op);  // it has no steps
    }
    if (failed_.load()) break;
  }
  return !fresh.empty();
}

void HostGroup::settle(ScheduleExecutor& op) noexcept {
  if (op.surprise_peer >= 0 && op.agreed)  // else the signatures are being exchanged, which give more information
    return fail({FailureKind::mismatch, describe(op.call, op.sequence) + ": rank " + std::to_string(op.surprise_peer) +
                                            " sent " + std::to_string(op.surprise) +
                                            " bytes where another number was expected: the ranks called different "
                                            "operations (TESSERA_CHECK=1 shows which)"},
                true);
  if (op.complete() && op.agreed) finish(op, ScheduleExecutor::kGood);
}

void HostGroup::finish(ScheduleExecutor& op, std::uint32_t how) noexcept {
  running_.erase(std::find(running_.begin(), running_.end(), &op));
  ScheduleExecutor* parent = op.parent;
  op.finished.store(how);
  if (parent != nullptr && --parent->parts_left == 0)
    parent->finished.store(failed_.load() ? ScheduleExecutor::kFailed : ScheduleExecutor::kGood);
  world_->forget(op);
  world_->engine().end_operation();
  op.release();
  if (parent != nullptr) parent->release();
  {
    const std::lock_guard lock(submit_mutex_);
    if (in_flight_.fetch_sub(1) == 1) idle_.store(1);
  }
  world_->engine().wake_waiters();
}

std::atomic<std::uint64_t>* HostGroup::counter(const ScheduleExecutor& op, int member) noexcept {
  if (op.internal) return nullptr;
  return &sent_[static_cast<std::size_t>(op.call.kind) * members_.size() + static_cast<std::size_t>(member)];
}

bool HostGroup::begin_native_in_order(const ScheduleExecutor& op) noexcept {
  if (!op.agreed || op.turn != native_begun_ + 1) return false;
  ++native_begun_;
  return true;
}

/// The library can't report what it sent.
void HostGroup::count_native(const ScheduleExecutor& op) noexcept {
  if (op.internal) return;
  const std::size_t size = size_of(op.call.out.dtype);
  const std::size_t parts =
      op.call.kind == OpKind::all_reduce || op.call.kind == OpKind::broadcast || op.call.kind == OpKind::reduce
          ? 1
          : members_.size();
  const std::size_t count = part_count(op.call, this->size()) * parts;
  for (int k = 0; k < this->size(); ++k)
    counter(op, k)->fetch_add(direct_bytes_to(op.call.kind, count, size,
                                              {.ranks = this->size(), .rank = rank_, .peer = k, .root = op.call.root}));
}

void HostGroup::read_traffic(TrafficStats& snapshot) const {
  for (std::size_t kind = 0; kind < kOpKinds; ++kind)
    for (std::size_t member = 0; member < members_.size(); ++member) {
      const std::uint64_t bytes = sent_[kind * members_.size() + member].load(std::memory_order_relaxed);
      snapshot.by_kind[kind].bytes_sent += bytes;
      snapshot.bytes_to_peer[member] += bytes;
    }
}

}  // namespace tessera::comm::host
