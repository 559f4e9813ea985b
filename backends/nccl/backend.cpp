// The Communicator of this backend, the public interface of an NcclGroup, and its entry in the registry; selects the
// ranks' devices and exchanges the world's id.
#include <algorithm>
#include <array>
#include <cstring>

#include "backends/nccl/api.h"
#include "backends/nccl/nccl_group.h"
#include "tessera/base/device_stream.h"
#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/registry.h"

namespace tessera::comm::nccl {
namespace {

void require_device(MemoryKind kind) {
  if (kind != MemoryKind::device) throw Unsupported("nccl: allocate supports device memory only");
}

class NcclCommunicator final : public GroupCommunicator<NcclGroup> {
 public:
  using GroupCommunicator::GroupCommunicator;

 private:
  std::unique_ptr<Communicator> do_split(int color, int key, const SplitOptions& options) override {
    std::shared_ptr<NcclGroup> child = group_->split(color, key, options);
    return child == nullptr ? nullptr : std::make_unique<NcclCommunicator>(std::move(child), this->options());
  }
  std::unique_ptr<Communicator> do_create_group(std::span<const int> members, const OpOptions& options) override {
    return std::make_unique<NcclCommunicator>(group_->create_group(plan_group(members, options, rank())),
                                              this->options());
  }

  Buffer do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) override {
    require_device(kind);
    return group_->runtime().memory().allocate(bytes, use.value_or(MemoryCategory::other),
                                               use ? memory_tracker() : nullptr);
  }
  Buffer do_allocate_symmetric(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) override {
    require_device(kind);
    return group_->symmetric_memory().allocate(bytes, use.value_or(MemoryCategory::other),
                                               use ? memory_tracker() : nullptr);
  }

  void do_after(Stream& stream) override {
    if (auto* const device = dynamic_cast<DeviceStream*>(&stream)) {
      // Handle 0, a program's default stream, is that of the current device.
      const DeviceGuard guard(group_->runtime().api(), device->device().index);
      group_->come_after(static_cast<cudaStream_t>(device->native()));
    } else if (!stream.immediate()) {
      stream.record().wait();
    }
  }
};

constexpr EnvVariable kDevice{"TESSERA_NCCL_DEVICE", "", "CUDA device of this rank; default: its local rank"};

constexpr EnvVariable kSymmetric{"TESSERA_NCCL_SYMMETRIC", "1",
                                 "0: no symmetric windows of NCCL, and no gathers by copy engines"};

constexpr EnvVariable kCopyEngines{
    "TESSERA_NCCL_COPY_ENGINES", "0",
    "1: gathers between symmetric windows of NCCL use copy engines; an abort can't end such a gather"};

std::string probe() {
  const LoadedApi& loaded = loaded_api();
  return loaded.problem.empty() ? unusable(loaded.api) : loaded.problem;
}

int choose_device(const Bootstrap& bootstrap, std::optional<Device> given, const NcclApi& api) {
  int devices = 0;
  check_cuda(api, api.cudaGetDeviceCount(&devices), "no CUDA device");
  if (const auto text = read_env(kDevice)) return static_cast<int>(parse_integer(*text, kDevice.name, 0, devices - 1));
  if (given && given->type == DeviceType::cuda) {
    if (given->index >= devices)
      throw InvalidUsage("nccl: there is no device " + name_of(*given) + "; this host has " + std::to_string(devices));
    return given->index;
  }
  const auto& hosts = bootstrap.hosts();
  const auto rank = static_cast<std::size_t>(bootstrap.rank());
  const auto before = std::count(hosts.begin(), hosts.begin() + bootstrap.rank(), hosts[rank]);
  // Launchers that give each rank its own device make only that visible. NCCL reports two ranks with the same one.
  return static_cast<int>(before) % devices;
}

/// "OP=direct,OP=direct": what the deterministic mode does anyway.
bool only_direct(std::string_view algorithms) {
  while (!algorithms.empty()) {
    const std::string_view entry = algorithms.substr(0, algorithms.find(','));
    if (!entry.ends_with("=direct")) return false;
    algorithms.remove_prefix(std::min(entry.size() + 1, algorithms.size()));
  }
  return true;
}

void require_possible(const BackendOptions& options, const NcclApi& api, int ranks) {
  if (options.deterministic && ranks > 1 && api.tree == nullptr)
    throw Unsupported(
        "nccl: this build lacks the kernels of deterministic mode, since it had no CUDA compiler; leave "
        "TESSERA_DETERMINISTIC out, or use another backend");
  if (!(options.deterministic && only_direct(options.algorithms)) && !options.algorithms.empty())
    throw InvalidUsage("TESSERA_ALGO: nccl chooses its algorithms itself; use NCCL_ALGO");
}

/// Why this rank has no symmetric windows; "" if it has.
std::string own_obstacle(const NcclApi& api, bool shared) {
  const auto wanted = read_env(kSymmetric);
  if (wanted && parse_integer(*wanted, kSymmetric.name, 0, 1) == 0) return std::string(kSymmetric.name) + " is 0";
  if (shared) return "ranks share a GPU";
  return api.has_windows() ? "" : "this version of NCCL has none, 2.27 and newer have";
}

/// Whether this rank wants gathers by copy engines.
bool wants_copy_engines() {
  const auto wanted = read_env(kCopyEngines);
  return wanted && parse_integer(*wanted, kCopyEngines.name, 0, 1) == 1;
}

/// Chooses this rank's device and loads the kernels on it. Where ranks share one, NCCL is told. What one rank lacks,
/// none uses: NCCL's calls must be the same everywhere.
RankDevice open_device(Bootstrap& bootstrap, std::optional<Device> given, const NcclApi& api) {
  int device = 0;
  const auto& hosts = bootstrap.hosts();
  const std::vector<std::string> gpus = exchange(bootstrap, [&] {
    device = choose_device(bootstrap, given, api);
    const DeviceGuard guard(api, device);
    if (api.tree != nullptr) check_cuda(api, api.tree->load(), "loading kernels");
    std::array<char, 64> bus{};
    check_cuda(api, api.cudaDeviceGetPCIBusId(bus.data(), bus.size(), device), "cudaDeviceGetPCIBusId");
    return hosts[static_cast<std::size_t>(bootstrap.rank())] + " " + bus.data();
  });
  const bool shared = share_gpu(gpus);
  if (shared) {
    const auto elsewhere = [&](const auto& host) { return host != hosts.front(); };
    allow_shared_gpu(api, bootstrap.rank(), std::ranges::none_of(hosts, elsewhere));
  }
  const std::vector<std::string> answers =
      exchange(bootstrap, [&] { return (wants_copy_engines() ? "1" : "0") + own_obstacle(api, shared); });
  const auto found = std::ranges::find_if(answers, [](const auto& one) { return one.size() > 1; });
  if (found != answers.end())
    return {device, "rank " + std::to_string(found - answers.begin()) + ": " + found->substr(1)};
  const bool all_want = std::ranges::all_of(answers, [](const auto& one) { return one == "1"; });
  return {device, "", all_want};
}

/// Returns the world's id, created by rank 0.
ncclUniqueId exchange_id(Bootstrap& bootstrap, const NcclApi& api, int device) {
  ncclUniqueId id;
  const std::vector<std::string> ids = exchange(bootstrap, [&] {
    if (bootstrap.rank() != 0) return std::string();
    const DeviceGuard guard(api, device);
    const ncclResult_t result = api.ncclGetUniqueId(&id);
    if (result != ncclSuccess) throw BackendError(std::string("ncclGetUniqueId: ") + api.ncclGetErrorString(result));
    return std::string(id.internal, sizeof(id.internal));
  });
  if (ids.front().size() != sizeof(id.internal))
    throw SystemError("nccl: a rank of this world runs another version of the library; use one version on all ranks");
  std::memcpy(id.internal, ids.front().data(), sizeof(id.internal));
  return id;
}

std::unique_ptr<Communicator> create(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options) {
  return make_world(std::move(bootstrap), options, loaded_api().api);
}

}  // namespace

std::unique_ptr<Communicator> make_world(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options,
                                         const NcclApi& api) {
  const auto version = [&] {  // which decides what windows and copy engines do
    int number = 0;
    api.ncclGetVersion(&number);
    return std::vector<SharedSetting>{{"NCCL's version", version_text(number)}};
  };
  require_alike(*bootstrap, version, options.global_ranks);
  require_possible(options, api, bootstrap->size());
  BackendOptions own = options;
  if (own.communicator.memory_tracker == nullptr) own.communicator.memory_tracker = std::make_shared<MemoryTracker>();
  const RankDevice device = open_device(*bootstrap, own.device, api);
  const ncclUniqueId id = exchange_id(*bootstrap, api, device.index);
  const auto world = std::make_shared<NcclRuntime>(std::move(bootstrap), own, api, device);
  world->open();
  const auto group = NcclGroup::create(world, 0);
  try {
    group->connect(id);
  } catch (...) {
    world->remove(*group);
    throw;
  }
  world->memory().add(*group);
  return std::make_unique<NcclCommunicator>(group, own.communicator);
}

const comm::Backend& backend();  // declared by the entry that the build generates
const comm::Backend& backend() {
  static constexpr std::array kVariables{kDevice, kSymmetric, kCopyEngines};
  static const comm::Backend kBackend{.name = "nccl",
                                      .devices = "cuda",
                                      .probe = probe,
                                      .create = create,
                                      .variables = kVariables,
                                      .deterministic = false};
  return kBackend;
}

}  // namespace tessera::comm::nccl
