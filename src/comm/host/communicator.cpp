// The Communicator over a transport: the public interface of a HostGroup.
#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/core/split.h"
#include "tessera/comm/host/host_group.h"
#include "tessera/comm/host_communicator.h"

namespace tessera::comm {
namespace host {
namespace {

class HostCommunicator final : public GroupCommunicator<HostGroup> {
 public:
  HostCommunicator(std::shared_ptr<HostGroup> group, CommunicatorOptions options, bool is_world)
      : GroupCommunicator(std::move(group), std::move(options), is_world) {
    group_->open();
  }

 private:
  std::string_view do_last_algorithm() const noexcept override { return group_->last_algorithm(); }
  std::unique_ptr<Communicator> do_split(int color, int key, const SplitOptions& options) override;
  std::unique_ptr<Communicator> do_create_group(std::span<const int> members, const OpOptions& options) override;
  std::shared_ptr<HostGroup> make_group(const GroupPlan& plan);
  std::unique_ptr<NativeCommunicator> copy_native();
  Buffer do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) override;
};

Buffer HostCommunicator::do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) {
  if (kind != MemoryKind::host) throw Unsupported(std::string(backend()) + ": allocate supports host memory only");
  // Without a use the caller tracks the memory, so it comes from a pool with an unused tracker.
  return (use ? group_->runtime().memory() : group_->runtime().unbooked_memory())
      .allocate(bytes, use.value_or(MemoryCategory::other));
}

/// Null if the library has no more of them on some rank.
std::unique_ptr<NativeCommunicator> HostCommunicator::copy_native() {
  std::unique_ptr<NativeCommunicator> copy;
  group_->start_copy(copy).wait();
  const std::vector<char> all = gather_for_split(*group_, static_cast<char>(copy != nullptr));
  if (std::ranges::find(all, 0) == all.end()) return copy;
  const std::lock_guard lock(group_->runtime().engine().mutex());
  copy.reset();
  return nullptr;
}

/// In each round every member proposes a number, and the highest is tried. If it is in use on one of them, all try
/// again.
std::shared_ptr<HostGroup> HostCommunicator::make_group(const GroupPlan& plan) {
  CommunicatorIds& ids = group_->runtime().ids();
  std::uint32_t from = group_->id() + 1;
  while (true) {
    const std::vector<std::uint32_t> proposals = gather_from_members(*group_, plan, ids.propose(from));
    const std::uint32_t id = *std::ranges::max_element(proposals);
    const bool reserved = ids.reserve(id);
    const std::vector<char> all_reserved = gather_from_members(*group_, plan, static_cast<char>(reserved));
    if (std::ranges::find(all_reserved, 0) == all_reserved.end())
      return std::make_shared<HostGroup>(group_->shared_runtime(), id, plan.rank, plan.world_ranks(*group_));
    if (reserved) ids.release(id);
    from = id + 1;
  }
}

std::unique_ptr<Communicator> HostCommunicator::do_split(int color, int key, const SplitOptions&) {
  const GroupPlan plan = plan_split(gather_for_split(*group_, SplitRequest{color, key}), rank(), timeout());
  if (plan.members.empty()) return nullptr;
  auto part = make_group(plan);
  const bool same_ranks = part->size() == group_->runtime().size() && std::ranges::is_sorted(part->members());
  if (same_ranks && group_->native() != nullptr) part->use_native(copy_native());
  return std::make_unique<HostCommunicator>(std::move(part), options(), false);
}

std::unique_ptr<Communicator> HostCommunicator::do_create_group(std::span<const int> members,
                                                                const OpOptions& options) {
  return std::make_unique<HostCommunicator>(make_group(plan_group(members, options, rank())), this->options(), false);
}

}  // namespace
}  // namespace host

std::unique_ptr<Communicator> make_host_communicator(std::shared_ptr<Bootstrap> bootstrap,
                                                     const BackendOptions& options, const std::string& name,
                                                     const TransportFactory& make_transport,
                                                     std::span<const OpKind> native) {
  BackendOptions own = options;
  if (own.communicator.memory_tracker == nullptr) own.communicator.memory_tracker = std::make_shared<MemoryTracker>();
  const auto world = std::make_shared<host::HostRuntime>(std::move(bootstrap), own, name, native);
  world->connect(make_transport);
  world->ids().reserve(0);
  std::vector<int> members(static_cast<std::size_t>(world->size()));
  for (std::size_t i = 0; i < members.size(); ++i) members[i] = static_cast<int>(i);
  auto group = std::make_shared<host::HostGroup>(world, 0, world->rank(), std::move(members));
  if (NativeCollectives* const collectives = world->transport().native(); collectives != nullptr && !own.deterministic)
    if (auto whole = collectives->whole_world()) group->use_native(std::move(whole));
  return std::make_unique<host::HostCommunicator>(std::move(group), own.communicator, true);
}

}  // namespace tessera::comm
