// Windows: device memory that ranks of a host read from each other, the windows of others that this rank has opened,
// and one communicator's state for calls through them.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/device_runtime.h"
#include "tessera/base/memory_pool.h"
#include "tessera/base/memory_tracker.h"
#include "tessera/comm/base_names.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm::staging {

/// Identifies a window within the world. Owner 0: none.
struct WindowId {
  std::uint64_t owner = 0;
  std::uint64_t number = 0;
  auto operator<=>(const WindowId&) const = default;  // NOLINT(modernize-use-nullptr): it means the 0 inside
};

/// A location in a window, as sent to other ranks.
struct WindowLocation {
  WindowId window;
  std::uint64_t offset = 0;
  IpcMemoryHandle handle;
};

/// Allocates windows and divides them into blocks, which are reused after their release. A window stays allocated until
/// no rank has it open, since a device must not free memory that is open elsewhere. One object for all communicators of
/// a rank. Thread-safe. Buffers may outlive it.
class IpcWindows : public std::enable_shared_from_this<IpcWindows> {
 public:
  explicit IpcWindows(std::shared_ptr<DeviceRuntime> device);
  ~IpcWindows() { close_others(); }

  /// Aligned to 256 bytes. Streams must be done with a buffer when it is released, since its memory is reused at once.
  Buffer allocate(std::size_t bytes, std::optional<MemoryCategory> use,
                  const std::shared_ptr<MemoryTracker>& memory_tracker);

  /// Empty if any of it is outside windows. Throws Unsupported if the device can't export it.
  std::optional<WindowLocation> place_of(const void* data, std::size_t bytes);
  /// Maps another rank's memory; a window is opened once and kept. Throws Unsupported if this rank can't access it.
  const std::byte* open(const WindowLocation& place);

  /// Closes the windows of other ranks, which are no longer read.
  void close_others() noexcept;
  /// No communicator uses it any more. `closed_by_all`: every rank has closed this rank's windows, so each is freed
  /// with its last buffer; otherwise they stay until the process ends.
  void end(bool closed_by_all) noexcept;

 private:
  struct Window {
    std::uint64_t number = 0;
    std::size_t bytes = 0;
    std::map<std::size_t, std::size_t> idle;  ///< bytes by offset
    std::optional<IpcMemoryHandle> handle;    ///< once it was exported
    bool whole() const { return idle.size() == 1 && idle.begin()->second == bytes; }
  };
  using All = std::map<std::byte*, Window>;

  std::byte* acquire(std::size_t bytes);
  void release(std::byte* data, std::size_t bytes) noexcept;
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

class StagingPipeline;

/// Used under the engine's lock, or while nothing is in flight.
class IpcState {
 public:
  IpcState(StagingPipeline& engine, int ranks, std::shared_ptr<Logger> logger);

  /// Whether the call may use windows, as far as all ranks can decide alike.
  bool suits(const OpDesc& call) const;

  /// Empty if it is not in a window, or if this device can't export it.
  std::optional<WindowLocation> place_of(const void* data, std::size_t bytes);
  const std::byte* open(const WindowLocation& place) { return windows_.open(place); }
  /// Whether the reader has opened the window before; it keeps the window open.
  bool knows(const WindowId& window, int reader) const { return known_.contains({window, reader}); }
  void learn(const WindowId& window, int reader) { known_.insert({window, reader}); }

  /// Counts the bytes that `reader` has read from this rank, and the backend's bytes that only carried locations.
  void count_read(OpKind kind, int reader, std::uint64_t bytes) { read_.add(kind, reader, bytes); }
  void count_sent(OpKind kind, int peer, std::uint64_t bytes) { sent_.add(kind, peer, bytes); }
  void correct(TrafficStats& snapshot) const;

  /// "ipc" if the last call used windows, "" if it was staged.
  std::string_view algorithm() const noexcept { return algorithm_; }
  void set_algorithm(std::string_view algorithm) noexcept { algorithm_ = algorithm; }
  /// Logs once why calls are staged.
  void complain(std::string_view why);

 private:
  struct Bytes {
    std::array<std::uint64_t, kOpKinds> by_kind{};
    std::vector<std::uint64_t> to_peer;
    void add(OpKind kind, int peer, std::uint64_t bytes) {
      by_kind[static_cast<std::size_t>(kind)] += bytes;
      to_peer[static_cast<std::size_t>(peer)] += bytes;
    }
  };

  StagingPipeline& engine_;
  IpcWindows& windows_;
  const int ranks_;
  const std::shared_ptr<Logger> logger_;
  std::set<std::pair<WindowId, int>> known_;
  Bytes read_;
  Bytes sent_;
  std::string_view algorithm_;
  bool complained_ = false;
};

}  // namespace tessera::comm::staging
