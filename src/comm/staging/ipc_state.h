// What one communicator has for calls through windows.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/comm/staging/ipc_windows.h"

namespace tessera::comm::staging {

class StagingPipeline;

/// Under the engine's lock, or where nothing is in flight.
class IpcState {
 public:
  IpcState(StagingPipeline& engine, int ranks, std::shared_ptr<Logger> logger);

  /// Whether the call may go through windows, as far as all ranks know alike.
  bool suits(const OpDesc& call) const;

  /// Nothing: it is no window, or this device can't share it.
  std::optional<WindowLocation> place_of(const void* data, std::size_t bytes);
  const std::byte* open(const WindowLocation& place) { return windows_.open(place); }
  /// A reader that has once opened a window keeps it.
  bool knows(const WindowId& window, int reader) const { return known_.contains({window, reader}); }
  void learn(const WindowId& window, int reader) { known_.insert({window, reader}); }

  /// Bytes that `reader` has read here, and bytes of the backend's that only said where.
  void count_read(OpKind kind, int reader, std::uint64_t bytes) { read_.add(kind, reader, bytes); }
  void count_told(OpKind kind, int peer, std::uint64_t bytes) { told_.add(kind, peer, bytes); }
  void correct(TrafficStats& snapshot) const;

  /// How the last call went: "ipc", or "" where it was staged.
  std::string_view way() const noexcept { return way_; }
  void went(std::string_view way) noexcept { way_ = way; }
  /// Says once why calls are staged.
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
  Bytes told_;
  std::string_view way_;
  bool complained_ = false;
};

}  // namespace tessera::comm::staging
