#include "tessera/comm/core/operation.h"

#include "tessera/comm/core/group_core.h"

namespace tessera::comm {

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
