#include "backends/shm/communicator.h"

#include "tessera/base/error.h"

namespace tessera::comm::shm {

ShmCommunicator::ShmCommunicator(std::shared_ptr<ShmGroup> group, CommunicatorOptions options, bool is_world)
    : Communicator(group->rank(), group->size(), std::move(options)), group_(std::move(group)), is_world_(is_world) {}

ShmCommunicator::~ShmCommunicator() {
  if (is_parents()) {
    group_->keep_forever();
    return;
  }
  group_->close();
  if (is_world_) group_->runtime().leave();
}

Buffer ShmCommunicator::do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) {
  if (kind != MemoryKind::host) throw Unsupported("shm: allocate supports host memory only");
  return group_->runtime().arena().allocate(bytes, use.value_or(MemoryCategory::other),
                                            use ? memory_tracker() : nullptr);
}

std::unique_ptr<Communicator> ShmCommunicator::do_split(int color, int key, const SplitOptions&) {
  return make_group(plan_split(gather_for_split(*group_, SplitRequest{color, key}), rank(), timeout()));
}

std::unique_ptr<Communicator> ShmCommunicator::do_create_group(std::span<const int> members, const OpOptions& options) {
  return make_group(plan_group(members, options, rank()));
}

std::unique_ptr<Communicator> ShmCommunicator::make_group(const GroupPlan& plan) {
  if (plan.members.empty()) return nullptr;
  auto child =
      std::make_shared<ShmGroup>(group_->shared_runtime(), plan.rank, plan.world_ranks(*group_), memory_tracker());
  child->connect(gather_from_members(*group_, plan, child->own_offsets()));
  return std::make_unique<ShmCommunicator>(std::move(child), options(), false);
}

}  // namespace tessera::comm::shm
