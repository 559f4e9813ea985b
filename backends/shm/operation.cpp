#include "backends/shm/operation.h"

#include "backends/shm/shm_group.h"

namespace tessera::comm::shm {

void ShmOperation::prepare(std::shared_ptr<ShmGroup> owner, const OpDesc& what) {
  group = std::move(owner);
  call = what;
  me = group->rank();
  ranks = group->size();
  const auto starts = [](std::vector<std::size_t>& into, std::span<const std::size_t> counts) {
    into.clear();
    if (counts.empty()) return;
    into.push_back(0);
    for (const std::size_t count : counts) into.push_back(into.back() + count);
  };
  starts(in_starts, what.in_counts);
  starts(out_starts, what.out_counts);
  call.in_counts = {};
  call.out_counts = {};
  deadline.store(Clock::time_point::max(), std::memory_order_relaxed);
  finished.store(0);
  stage = Stage::queued;
  eager = small = symmetric = internal = everyone = stages_in = remote_in = copied_in = stages_out = remote_out =
      copied_out = any_staged = any_awaits = streaming = false;
  arrived = 0;
  sequence = fingerprint = staged = reduced = 0;
  parent = nullptr;
  parts_left = 0;
}

ProgressEngine& ShmOperation::engine() const noexcept { return group->host().engine(); }
void ShmOperation::throw_failure() const { group->throw_failure(); }

void ShmOperation::recycle() noexcept {
  const std::shared_ptr<ShmGroup> keep = std::move(group);  // may be the last reference to the group, which owns this
  keep->put_back(*this);
}

}  // namespace tessera::comm::shm
