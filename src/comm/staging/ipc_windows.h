// Memory of a device that the ranks of a host read from each other, and what of the others' this rank has opened.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "tessera/base/device_runtime.h"
#include "tessera/base/memory_pool.h"
#include "tessera/base/memory_tracker.h"
#include "tessera/comm/base_names.h"

namespace tessera::comm::staging {

/// Tells a window from all others of the world. Owner 0: none.
struct WindowId {
  std::uint64_t owner = 0;
  std::uint64_t number = 0;
  auto operator<=>(const WindowId&) const = default;  // NOLINT(modernize-use-nullptr): it means the 0 inside
};

/// Where something lies, as another rank finds it.
struct WindowLocation {
  WindowId window;
  std::uint64_t offset = 0;
  IpcMemoryHandle handle;
};

/// Windows are cut into pieces, which are handed out again once they were given back, and stay with the device until
/// nobody reads them any more: a device may not free what somebody has open. One for all communicators of a rank.
/// Thread-safe. Buffers may outlive it.
class IpcWindows : public std::enable_shared_from_this<IpcWindows> {
 public:
  explicit IpcWindows(std::shared_ptr<DeviceRuntime> device);
  ~IpcWindows();
  IpcWindows(const IpcWindows&) = delete;
  IpcWindows& operator=(const IpcWindows&) = delete;

  /// Aligned to 256 bytes. Streams must be done with a buffer that is given back: its memory is the next one's at once.
  Buffer allocate(std::size_t bytes, std::optional<MemoryCategory> use,
                  const std::shared_ptr<MemoryTracker>& memory_tracker);

  /// Nothing: some of it is no window. Throws Unsupported where the device can't share it.
  std::optional<WindowLocation> place_of(const void* data, std::size_t bytes);
  /// Another rank's memory, opened once and kept. Throws Unsupported where this rank can't reach it.
  const std::byte* open(const WindowLocation& place);

  /// Nothing of the others' is read any more.
  void close_others() noexcept;
  /// No communicator uses it any more. `closed_by_all`: every rank has closed this one's windows, so that they go as
  /// their last buffer does; else they stay until the process ends.
  void end(bool closed_by_all) noexcept;

 private:
  struct Window {
    std::uint64_t number = 0;
    std::size_t bytes = 0;
    std::map<std::size_t, std::size_t> idle;  ///< bytes by offset
    std::optional<IpcMemoryHandle> handle;    ///< once it was asked for
    bool whole() const { return idle.size() == 1 && idle.begin()->second == bytes; }
  };
  using All = std::map<std::byte*, Window>;

  std::byte* take(std::size_t bytes);
  void give(std::byte* data, std::size_t bytes) noexcept;
  All::iterator add_window(std::size_t bytes);
  All::iterator window_with(const void* data, std::size_t bytes);
  void free_if_idle(All::iterator window) noexcept;

  const std::shared_ptr<DeviceRuntime> device_;
  const std::uint64_t owner_;
  std::mutex mutex_;
  All windows_;
  std::uint64_t next_ = 1;
  std::map<WindowId, void*> opened_;
  enum class State : std::uint8_t { used, closed, kept } state_ = State::used;
};

}  // namespace tessera::comm::staging
