#include "backends/shm/communicator.h"

#include "tessera/base/error.h"
#include "tessera/comm/core/split.h"

namespace tessera::comm::shm {

ShmCommunicator::ShmCommunicator(std::shared_ptr<ShmGroup> group, CommunicatorOptions options, bool is_world)
    : Communicator(group->rank(), group->size(), std::move(options)), group_(std::move(group)), is_world_(is_world) {}

ShmCommunicator::~ShmCommunicator() {
  group_->close();
  if (is_world_) group_->runtime().leave();
}

Buffer ShmCommunicator::do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) {
  if (kind != MemoryKind::host) throw Unsupported("shm: allocate supports host memory only");
  return group_->runtime().arena().allocate(bytes, use.value_or(MemoryCategory::other),
                                            use ? memory_tracker() : nullptr);
}

std::unique_ptr<Communicator> ShmCommunicator::do_split(int color, int key) {
  const SplitPlan plan = plan_split(gather_for_split(*group_, SplitRequest{color, key}), rank());
  std::shared_ptr<ShmGroup> child;
  MemberBlocks::Offsets own;
  if (color >= 0) {
    child =
        std::make_shared<ShmGroup>(group_->shared_runtime(), plan.rank, plan.world_ranks(*group_), memory_tracker());
    own = child->own_offsets();
  }
  const std::vector<MemberBlocks::Offsets> all = gather_for_split(*group_, own);  // ranks without a child take part
  if (child == nullptr) return nullptr;
  std::vector<MemberBlocks::Offsets> members;
  for (const int member : plan.members) members.push_back(all[static_cast<std::size_t>(member)]);
  child->connect(members);
  return std::make_unique<ShmCommunicator>(std::move(child), options(), false);
}

}  // namespace tessera::comm::shm
