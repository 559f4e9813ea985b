#include "backends/nccl/communicator.h"

#include "tessera/base/device_stream.h"
#include "tessera/base/error.h"

namespace tessera::comm::nccl {
namespace {

void require_device(MemoryKind kind) {
  if (kind != MemoryKind::device) throw Unsupported("nccl: allocate supports device memory only");
}

}  // namespace

NcclCommunicator::NcclCommunicator(std::shared_ptr<NcclGroup> group, CommunicatorOptions options)
    : Communicator(group->rank(), group->size(), std::move(options)), group_(std::move(group)) {}

NcclCommunicator::~NcclCommunicator() {
  if (is_parents()) {
    group_->keep_forever();
    return;
  }
  group_->close();
}

std::unique_ptr<Communicator> NcclCommunicator::do_split(int color, int key, const SplitOptions& options) {
  std::shared_ptr<NcclGroup> child = group_->split(color, key, options);
  return child == nullptr ? nullptr : std::make_unique<NcclCommunicator>(std::move(child), this->options());
}

std::unique_ptr<Communicator> NcclCommunicator::do_create_group(std::span<const int> members,
                                                                const OpOptions& options) {
  auto group = group_->create_group(plan_group(members, options, rank()));
  return std::make_unique<NcclCommunicator>(std::move(group), this->options());
}

Buffer NcclCommunicator::do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) {
  require_device(kind);
  return group_->runtime().memory().allocate(bytes, use.value_or(MemoryCategory::other),
                                             use ? memory_tracker() : nullptr);
}

Buffer NcclCommunicator::do_allocate_symmetric(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) {
  require_device(kind);
  return group_->symmetric_memory().allocate(bytes, use.value_or(MemoryCategory::other),
                                             use ? memory_tracker() : nullptr);
}

void NcclCommunicator::do_after(Stream& stream) {
  if (auto* const device = dynamic_cast<DeviceStream*>(&stream)) {
    // Handle 0, a program's default stream, is that of the current device.
    const DeviceGuard guard(group_->runtime().api(), device->device().index);
    group_->come_after(static_cast<cudaStream_t>(device->native()));
  } else if (!stream.immediate()) {
    stream.record().wait();
  }
}

}  // namespace tessera::comm::nccl
