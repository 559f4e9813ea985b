#include "tessera/comm/core/polled_group.h"

#include <sched.h>

#include <chrono>
#include <mutex>
#include <string>

#include "tessera/comm/core/group_core.h"
#include "tessera/comm/core/operation.h"

namespace tessera::comm {

PolledGroup::PolledGroup(ProgressEngine& engine, std::shared_ptr<const BackendOptions> options, int rank,
                         std::vector<int> members)
    : GroupCore(std::move(options), rank, std::move(members)), engine_(engine) {}
PolledGroup::~PolledGroup() = default;

Work PolledGroup::launch(Operation& op) {
  op.group = shared_from_this();
  const WorkRef hold(op);
  if (op.state.load() != Operation::pending) return {};  // it needed no other rank
  submit(op);
  engine_.try_poll(false);
  if (op.small) engine_.spin_for_completion(op.state);
  if (op.state.load() == Operation::succeeded) return {};
  op.start_deadline();
  engine_.wake_waiters();  // the thread that holds the lock may have polled before the submission
  engine_.wake_progress_thread_if_idle();
  return Work(&op);
}

void PolledGroup::poll_after_batch() noexcept {
  engine_.try_poll(false);
  engine_.wake_waiters();
  engine_.wake_progress_thread();
}

void PolledGroup::submit(Operation& op) noexcept {
  op.retain();  // until complete()
  if (op.batch != nullptr) op.batch->retain();
  engine_.begin_operation();
  {
    const std::lock_guard lock(mutex_);
    begin_in_flight();
    submitted_.push(op);
    any_submitted_.store(true);
  }
  engine_.active_groups().activate(*this);
}

OperationQueue<Operation> PolledGroup::take_submitted() noexcept {
  if (!any_submitted_.load()) return {};
  const std::lock_guard lock(mutex_);
  any_submitted_.store(false);
  return std::exchange(submitted_, {});
}

void PolledGroup::complete(Operation& op, Operation::State state) noexcept {
  Operation* batch = op.batch;
  op.state.store(state);
  defer_callbacks(op);
  if (batch != nullptr && --batch->batch_remaining == 0) {
    batch->state.store(failed() ? Operation::failed : Operation::succeeded);
    defer_callbacks(*batch);
  }
  engine_.end_operation();
  op.release();
  if (batch != nullptr) batch->release();
  end_in_flight();
}

void PolledGroup::begin_in_flight() noexcept {
  if (in_flight_.fetch_add(1) == 0) idle_.store(0);
}

void PolledGroup::end_in_flight() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (in_flight_.fetch_sub(1) == 1) idle_.store(1);
  }
  engine_.wake_waiters();
}

void PolledGroup::on_done(Operation& op, WorkCallback callback) {
  {
    const std::lock_guard lock(engine_.mutex());
    if (op.state.load() == Operation::pending) {
      if (callback) op.callbacks.push_back(std::move(callback));
      engine_.wake_progress_thread();  // perhaps no thread will wait for it
      return;
    }
  }
  if (callback) callback(error_of(op));
}

void PolledGroup::defer_callbacks(Operation& op) {
  if (op.callbacks.empty()) return;
  op.retain();
  {
    const std::lock_guard lock(mutex_);
    begin_in_flight();
  }
  engine_.defer([this, &op] { run_callbacks(op); });
}

void PolledGroup::run_callbacks(Operation& op) noexcept {
  const std::exception_ptr error = error_of(op);
  for (const WorkCallback& callback : std::exchange(op.callbacks, {})) callback(error);
  op.release();
  const std::lock_guard lock(engine_.mutex());  // which the group's end waits for
  end_in_flight();
}

void PolledGroup::fail(Failure failure, bool notify) noexcept {
  const bool first = failure_.set(std::move(failure));
  if (first) publish_failure(notify);
  for (OperationQueue<Operation> submitted = take_submitted(); !submitted.empty();)
    complete(submitted.pop(), Operation::failed);
  fail_operations(first);
}

/// If the lock is not to be had, perhaps since a signal handler calls and has interrupted the thread that holds it,
/// another thread aborts, or the next wait().
void PolledGroup::abort(std::string_view reason) noexcept {
  constexpr std::chrono::milliseconds kPatience{100};
  std::unique_lock lock(engine_.mutex(), std::try_to_lock);
  for (const auto until = Clock::now() + kPatience; !lock && Clock::now() < until && !lock.try_lock();) ::sched_yield();
  if (!lock)
    engine_.defer([group = shared_from_this(), text = std::string(reason)] { group->abort(text); });
  else if (!failed())
    GroupCore::abort(reason);
}

void PolledGroup::fail_call(Failure failure) {
  {
    const std::lock_guard lock(engine_.mutex());
    if (!failed()) fail(std::move(failure), true);
  }
  failure_.rethrow();
}

void PolledGroup::finish_operations() noexcept {
  // Terminates: every operation has a deadline, at which it fails.
  while (!engine_.wait(idle_, Clock::now() + std::chrono::hours(1))) {
  }
  const std::lock_guard lock(engine_.mutex());
  engine_.active_groups().remove(*this);
}

Operation::~Operation() = default;

/// Its memory is the caller's again, while a peer may still read it. A peer that sees what the caller writes there then
/// also sees the failure, or that its message was canceled: it looks after it has read, behind an acquire fence.
bool Operation::has_failed() const noexcept {
  if (state.load() != failed) return false;
  std::atomic_thread_fence(std::memory_order_release);
  return true;
}

bool Operation::done() noexcept {
  if (state.load() == pending) group->advance();
  return state.load() == succeeded || has_failed();
}

bool Operation::wait_until(Clock::time_point until) {
  if (!group->wait_for(*this, until)) return false;
  if (has_failed()) group->throw_failure(*this);
  return true;
}

void Operation::wait() {
  // Terminates: the group fails the operation at its deadline.
  while (!wait_until(Clock::now() + std::chrono::hours(1))) {
  }
}

void Operation::on_done(WorkCallback callback) { group->on_done(*this, std::move(callback)); }

std::string Operation::format() const { return describe(call, sequence); }

void Operation::recycle() noexcept {
  const std::shared_ptr<GroupCore> keep = std::move(group);  // may be the last reference to the group, which owns this
  keep->recycle(*this);
}

}  // namespace tessera::comm
