#include "backends/nccl/operation.h"

#include "backends/nccl/backoff.h"
#include "backends/nccl/nccl_group.h"
#include "tessera/base/device_stream.h"
#include "tessera/base/error.h"

namespace tessera::comm::nccl {

void NcclOperation::prepare(std::shared_ptr<NcclGroup> owner, OpInfo about) {
  group = std::move(owner);
  what = std::move(about);
  deadline = Clock::now() + what.timeout;
  recorded = false;
  finished.store(0);
}

bool NcclOperation::done() noexcept {
  if (finished.load() == 0) group->retire_completed();
  return finished.load() != 0;
}

bool NcclOperation::wait_until(Clock::time_point until) {
  Backoff pause;
  while (!done()) {
    const Clock::time_point now = Clock::now();
    if (now >= deadline) {
      group->time_out(*this);
      continue;
    }
    if (now >= until) return false;
    pause(std::min(until, deadline) - now);
  }
  if (finished.load() == kFailed) group->throw_failure(this);
  return true;
}

void NcclOperation::wait() { wait_until(Clock::time_point::max()); }

void NcclOperation::wait_on(Stream& stream) {
  auto* const device = dynamic_cast<DeviceStream*>(&stream);
  if (device == nullptr) return WorkState::wait_on(stream);
  if (finished.load() == kFailed) group->throw_failure(this);
  event.make_stream_wait(static_cast<cudaStream_t>(device->native()));
}

std::string NcclOperation::describe() const {
  std::string text(what.name);
  if (what.sort == OpClass::message)
    text += (what.name == "send" ? " to rank " : " from rank ") + std::to_string(what.peer);
  if (what.sequence != 0) text += " #" + std::to_string(what.sequence);
  if (!what.label.empty()) text += " (" + what.label + ")";
  return text;
}

void NcclOperation::recycle() noexcept {
  const std::shared_ptr<NcclGroup> keep = std::move(group);  // may be the last reference to the group, which owns this
  keep->put_back(*this);
}

}  // namespace tessera::comm::nccl
