// The Communicator of this backend, the public interface of a ShmGroup, and its entry in the registry.
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <numeric>

#include "backends/shm/shm_group.h"
#include "tessera/base/error.h"
#include "tessera/comm/core/split.h"
#include "tessera/comm/registry.h"

namespace tessera::comm::shm {
namespace {

class ShmCommunicator final : public GroupCommunicator<ShmGroup> {
 public:
  using GroupCommunicator::GroupCommunicator;

 private:
  std::string_view do_last_algorithm() const noexcept override { return group_->last_algorithm(); }

  Buffer do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) override {
    if (kind != MemoryKind::host) throw Unsupported("shm: allocate supports host memory only");
    return group_->runtime().arena().allocate(bytes, use.value_or(MemoryCategory::other),
                                              use ? memory_tracker() : nullptr);
  }

  std::unique_ptr<Communicator> do_split(int color, int key, const SplitOptions&) override {
    return make_group(plan_split(gather_for_split(*group_, SplitRequest{color, key}), rank(), timeout()));
  }

  std::unique_ptr<Communicator> do_create_group(std::span<const int> members, const OpOptions& options) override {
    return make_group(plan_group(members, options, rank()));
  }

  std::unique_ptr<Communicator> make_group(const GroupPlan& plan) {
    if (plan.members.empty()) return nullptr;
    auto child =
        std::make_shared<ShmGroup>(group_->shared_runtime(), plan.rank, plan.world_ranks(*group_), memory_tracker());
    child->connect(gather_from_members(*group_, plan, child->own_offsets()));
    return std::make_unique<ShmCommunicator>(std::move(child), options());
  }
};

std::string probe() {
  const UniqueFd fd(::memfd_create("tessera-probe", MFD_CLOEXEC));
  return fd ? "" : "this system has no memfd_create: " + std::string(std::strerror(errno));
}

std::unique_ptr<Communicator> create(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options) {
  BackendOptions own = options;
  if (own.communicator.memory_tracker == nullptr) own.communicator.memory_tracker = std::make_shared<MemoryTracker>();
  const std::shared_ptr<ShmRuntime> runtime = ShmRuntime::make(bootstrap, own);
  std::vector<int> ranks(static_cast<std::size_t>(bootstrap->size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  auto group =
      std::make_shared<ShmGroup>(runtime, bootstrap->rank(), std::move(ranks), own.communicator.memory_tracker);
  const MemberBlocks::Offsets place = group->own_offsets();
  std::vector<MemberBlocks::Offsets> places;
  for (const std::string& blob : bootstrap->all_gather({reinterpret_cast<const char*>(&place), sizeof(place)})) {
    if (blob.size() != sizeof(place))
      throw SystemError("shm: a rank of this world runs another version of the library; use one version on all ranks");
    std::memcpy(&places.emplace_back(), blob.data(), sizeof(place));
  }
  group->connect(places);
  runtime->watch();
  return std::make_unique<ShmCommunicator>(std::move(group), own.communicator, true);
}

}  // namespace

const comm::Backend& backend();  // declared by the generated list
const comm::Backend& backend() {
  static const comm::Backend kBackend{
      .name = "shm", .devices = "cpu", .probe = probe, .create = create, .variables = {}, .one_host = true};
  return kBackend;
}

}  // namespace tessera::comm::shm
