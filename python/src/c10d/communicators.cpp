#include "c10d/communicators.h"

#include <c10/util/Exception.h>

#include <utility>

#include "c10d/errors.h"
#include "c10d/store.h"
#include "tessera/base/env.h"
#include "tessera/comm/init.h"
#include "tessera/comm/staging.h"

namespace tessera::c10d_backend {
namespace {

/// The backend that moves memory of devices only, so that host memory needs another one.
constexpr const char* kOfDevices = "nccl";

std::optional<std::string> chosen_backend() { return base::read_env({"TESSERA_BACKEND", "", ""}); }
bool moves_devices_only() { return chosen_backend() == kOfDevices; }

bool is_device(const std::optional<c10::Device>& device) { return device && !device->is_cpu(); }

/// Threads may make groups at the same time. Their names can't tell them apart: PyTorch counts them on each rank, which
/// may have made others without this group's members.
int tag_of(const std::vector<int>& members) {
  std::size_t hash = members.size();
  for (const int member : members) hash = hash * 1'000'003 + static_cast<std::size_t>(member);
  return static_cast<int>(hash % (comm::kMaxTag + 1));
}

}  // namespace

std::unique_ptr<comm::Communicator> Communicators::make_world(const char* backend, const std::string& prefix,
                                                              std::shared_ptr<base::DeviceRuntime> device) const {
  comm::InitOptions options;
  if (backend != nullptr) options.backend = backend;
  options.launch = comm::Launch{.launcher = "torch",
                                .rank = settings_.rank,
                                .size = settings_.size,
                                .local_size = settings_.size,
                                .job = "torch"};
  options.timeout = settings_.timeout;
  options.store = std::make_shared<TorchStore>(settings_.store, prefix);
  options.global_ranks = settings_.global_ranks;
  options.device = std::move(device);
  return comm::init(std::move(options));
}

Communicators::Communicators(const GroupSettings& settings) : settings_(settings) {
  with_torch_errors([&] {
    // PyTorch's programs may run on several hosts without having said so to the library.
    const char* const host = moves_devices_only() || !chosen_backend() ? "auto" : nullptr;
    if (!is_device(settings_.device)) {
      host_ = make_world(host, "", nullptr);
      return;
    }
    device_ = std::make_shared<const TensorDevice>(*settings_.device);
    staged_ = !moves_devices_only();
    host_ = make_world(host, "", staged_ ? device_->runtime() : nullptr);
    if (!staged_) on_device_ = make_world(kOfDevices, "device/", device_->runtime());
  });
}

Communicators::Communicators(const std::shared_ptr<Communicators>& parent, const GroupSettings& settings,
                             const std::string& group_name)
    : parent_(parent), settings_(settings) {
  comm::Communicator* host = nullptr;
  {
    const std::lock_guard lock(parent->mutex_);
    host = &parent->host();
    staged_ = parent->staged_;
    if (staged_ || is_device(parent->settings_.device)) device_ = parent->device_;
  }
  const std::vector<int>& members = settings_.global_ranks;
  const comm::OpOptions options{.timeout = settings_.timeout, .label = group_name, .tag = tag_of(members)};
  with_torch_errors([&] {
    host_ = host->create_group(members, options);
    // Where the ranks knew their devices at the start, all of them have the parent's communicator, and it doesn't
    // change.
    if (is_device(parent->settings_.device) && parent->on_device_ != nullptr)
      on_device_ = parent->on_device_->create_group(members, options);
  });
}

comm::Communicator& Communicators::host() const {
  if (host_ != nullptr) return *host_;
  C10_THROW_ERROR(DistBackendError,
                  "tessera: this process group could not be extended to a device; create another one");
}

comm::Communicator& Communicators::on(const c10::Device& device) {
  if (device.is_cpu()) return host();
  if (device_ == nullptr || (on_device_ == nullptr && !staged_)) open(device);
  if (device_->device() != device)
    C10_THROW_ERROR(ValueError, "tessera: this process group moves tensors of " + device_->device().str() +
                                    ", not of " + device.str() +
                                    "; a group has one device: its first call's, or device_id's");
  return on_device_ != nullptr ? *on_device_ : host();
}

void Communicators::open(const c10::Device& device) {
  auto opened = std::make_shared<const TensorDevice>(device);
  if (moves_devices_only()) {
    on_device_ = make_world(kOfDevices, "device/", opened->runtime());
    device_ = std::move(opened);
    return;
  }
  const std::lock_guard lock(mutex_);
  // A message may be the first call of some ranks, so nothing is exchanged with the others.
  host_ = comm::stage(std::move(host_), opened->runtime(), {.negotiates_ipc = false});
  staged_ = true;
  device_ = std::move(opened);
}

void Communicators::abort(const std::string& reason) noexcept {
  for (comm::Communicator* one : {host_.get(), on_device_.get()})
    if (one != nullptr) one->abort(reason);
}

}  // namespace tessera::c10d_backend
