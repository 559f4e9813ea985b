#include "tessera/comm/staging/ipc_windows.h"

#include <sys/random.h>

#include <algorithm>
#include <string>

#include "tessera/base/error.h"
#include "tessera/comm/core/op_traits.h"
#include "tessera/comm/kernels/reduce.h"
#include "tessera/comm/staging/pipeline.h"

namespace tessera::comm::staging {
namespace {

constexpr std::size_t kGranularity = 256;
/// The unit in which devices map memory: a smaller window would expose neighboring memory.
constexpr std::size_t kStep = std::size_t{2} << 20;

std::size_t round_up(std::size_t bytes, std::size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

std::uint64_t random_name() {
  std::uint64_t bits = 0;
  if (::getrandom(&bits, sizeof bits, 0) != static_cast<ssize_t>(sizeof bits)) throw system_error("getrandom");
  return bits | 1U;
}

}  // namespace

IpcWindows::IpcWindows(std::shared_ptr<DeviceRuntime> device) : device_(std::move(device)), owner_(random_name()) {}

Buffer IpcWindows::allocate(std::size_t bytes, std::optional<MemoryCategory> use,
                            const std::shared_ptr<MemoryTracker>& memory_tracker) {
  const std::size_t held = round_up(std::max<std::size_t>(bytes, 1), kGranularity);
  std::byte* const data = acquire(held);
  if (use) memory_tracker->add(*use, bytes);
  return {data, bytes, [self = shared_from_this(), use, memory_tracker, held](void* p, std::size_t n) {
            if (use) memory_tracker->remove(*use, n);
            self->release(static_cast<std::byte*>(p), held);
          }};
}

/// Uses the smallest idle block that is large enough, or else a new window.
std::byte* IpcWindows::acquire(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  auto best = windows_.end();
  std::size_t offset = 0;
  std::size_t least = 0;
  for (auto window = windows_.begin(); window != windows_.end(); ++window)
    for (const auto& [at, size] : window->second.idle) {
      if (size < bytes || (best != windows_.end() && size >= least)) continue;
      best = window;
      offset = at;
      least = size;
    }
  if (best == windows_.end()) {
    best = add_window(round_up(bytes, kStep));
    offset = 0;
    least = best->second.bytes;
  }
  best->second.idle.erase(offset);
  if (least > bytes) best->second.idle[offset + bytes] = least - bytes;
  return best->first + offset;
}

IpcWindows::All::iterator IpcWindows::add_window(std::size_t bytes) {
  auto* const data = static_cast<std::byte*>(device_->allocate(bytes));
  Window made{.number = next_++, .bytes = bytes, .idle = {}, .handle = {}};
  made.idle[0] = bytes;
  return windows_.emplace(data, std::move(made)).first;
}

void IpcWindows::release(std::byte* data, std::size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  const auto window = window_with(data, bytes);
  std::map<std::size_t, std::size_t>& idle = window->second.idle;
  auto here = idle.emplace(static_cast<std::size_t>(data - window->first), bytes).first;
  if (const auto after = std::next(here); after != idle.end() && here->first + here->second == after->first) {
    here->second += after->second;
    idle.erase(after);
  }
  if (here != idle.begin()) {
    const auto before = std::prev(here);
    if (before->first + before->second == here->first) {
      before->second += here->second;
      idle.erase(here);
    }
  }
  if (state_ == State::closed) free_if_idle(window);
}

IpcWindows::All::iterator IpcWindows::window_with(const void* data, std::size_t bytes) {
  auto* const begin = static_cast<std::byte*>(const_cast<void*>(data));
  const auto after = windows_.upper_bound(begin);
  if (after == windows_.begin()) return windows_.end();
  const auto found = std::prev(after);
  return begin + bytes <= found->first + found->second.bytes ? found : windows_.end();
}

std::optional<WindowLocation> IpcWindows::place_of(const void* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = window_with(data, bytes);
  if (found == windows_.end()) return std::nullopt;
  Window& window = found->second;
  if (!window.handle) window.handle = device_->get_ipc_handle(found->first, window.bytes);
  const auto offset = static_cast<std::uint64_t>(static_cast<const std::byte*>(data) - found->first);
  return WindowLocation{.window = {owner_, window.number}, .offset = offset, .handle = *window.handle};
}

const std::byte* IpcWindows::open(const WindowLocation& place) {
  const std::lock_guard lock(mutex_);
  auto found = opened_.find(place.window);
  if (found == opened_.end()) found = opened_.emplace(place.window, device_->open_ipc_handle(place.handle)).first;
  return static_cast<const std::byte*>(found->second) + place.offset;
}

void IpcWindows::close_others() noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& [name, data] : opened_) device_->close_ipc_handle(data);
  opened_.clear();
}

void IpcWindows::end(bool closed_by_all) noexcept {
  const std::lock_guard lock(mutex_);
  state_ = closed_by_all ? State::closed : State::kept;
  for (auto window = windows_.begin(); window != windows_.end();) free_if_idle(window++);
}

/// A window that was never sent to another rank is used only by this rank.
void IpcWindows::free_if_idle(All::iterator window) noexcept {
  const Window& which = window->second;
  if (!which.whole() || (state_ == State::kept && which.handle)) return;
  device_->free(window->first, which.bytes);
  windows_.erase(window);
}

IpcState::IpcState(StagingPipeline& engine, int ranks, std::shared_ptr<Logger> logger)
    : engine_(engine), windows_(*engine.windows()), ranks_(ranks), logger_(std::move(logger)) {
  read_.to_peer.resize(static_cast<std::size_t>(ranks));
  sent_.to_peer.resize(static_cast<std::size_t>(ranks));
}

bool IpcState::suits(const OpDesc& call) const {
  switch (call.kind) {
    case OpKind::send:
    case OpKind::recv:
    case OpKind::barrier:
      return false;
    case OpKind::all_reduce:
    case OpKind::all_gather:
    case OpKind::reduce_scatter:
    case OpKind::broadcast: {  // every rank knows the size of these
      const std::size_t bytes = call.kind == OpKind::reduce_scatter ? call.in.bytes() : call.out.bytes();
      const std::string_view algorithm = engine_.algorithms().choose(call.kind, bytes);
      if (!algorithm.empty() && algorithm != "direct") return false;
      break;
    }
    default:
      break;
  }
  return !reduces(call.kind) || ranks_ <= DeviceReduceKernels::kMaxSources;
}

std::optional<WindowLocation> IpcState::place_of(const void* data, std::size_t bytes) {
  try {
    return windows_.place_of(data, bytes);
  } catch (const Unsupported& error) {
    complain(error.what());
    return std::nullopt;
  }
}

void IpcState::correct(TrafficStats& snapshot) const {
  for (std::size_t i = 0; i < kOpKinds; ++i) snapshot.by_kind[i].bytes_sent += read_.by_kind[i] - sent_.by_kind[i];
  for (std::size_t r = 0; r < snapshot.bytes_to_peer.size(); ++r)
    snapshot.bytes_to_peer[r] += read_.to_peer[r] - sent_.to_peer[r];
}

void IpcState::complain(std::string_view why) {
  if (std::exchange(complained_, true) || logger_ == nullptr) return;
  logger_->write(LogLevel::warn, "memory of " + name_of(engine_.device().device()) +
                                     " moves through pinned host memory, not by IPC: " + std::string(why));
}

}  // namespace tessera::comm::staging
