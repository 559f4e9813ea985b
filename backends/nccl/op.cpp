#include "backends/nccl/op.h"

#include "backends/nccl/group.h"
#include "backends/nccl/pause.h"
#include "tessera/base/device_stream.h"
#include "tessera/base/error.h"

namespace tessera::nccl {

void Op::prepare(std::shared_ptr<Group> owner, What about) {
  group = std::move(owner);
  what = std::move(about);
  deadline = Clock::now() + what.timeout;
  recorded = false;
  finished.store(0);
}

bool Op::done() noexcept {
  if (finished.load() == 0) group->reap();
  return finished.load() != 0;
}

bool Op::wait_until(Clock::time_point until) {
  Pause pause;
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

void Op::wait() { wait_until(Clock::time_point::max()); }

void Op::wait_on(Stream& stream) {
  auto* const device = dynamic_cast<DeviceStream*>(&stream);
  if (device == nullptr) return WorkState::wait_on(stream);
  if (finished.load() == kFailed) group->throw_failure(this);
  event.hold_up(static_cast<cudaStream_t>(device->native()));
}

std::string Op::describe() const {
  std::string text(what.name);
  if (what.sort == Sort::message)
    text += (what.name == "send" ? " to rank " : " from rank ") + std::to_string(what.peer);
  if (what.sort == Sort::ordered) text += " #" + std::to_string(what.sequence);
  if (!what.label.empty()) text += " (" + what.label + ")";
  return text;
}

void Op::recycle() noexcept {
  const std::shared_ptr<Group> keep = std::move(group);  // may be the last to hold the group, and with it this
  keep->put_back(*this);
}

}  // namespace tessera::nccl
