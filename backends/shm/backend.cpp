// The entry of this backend in the registry.
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <numeric>

#include "backends/shm/communicator.h"
#include "tessera/base/error.h"
#include "tessera/comm/registry.h"

namespace tessera::comm::shm {
namespace {

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
