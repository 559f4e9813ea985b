#include "tessera/comm/core/operation.h"

#include "tessera/comm/core/format.h"
#include "tessera/comm/core/group_core.h"

namespace tessera::comm {

Operation::~Operation() = default;

bool Operation::done() noexcept {
  if (state.load() == pending) group->advance();
  return state.load() != pending;
}

bool Operation::wait_until(Clock::time_point until) {
  if (!group->wait_for(*this, until)) return false;
  if (state.load() == failed) group->throw_failure(*this);
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
