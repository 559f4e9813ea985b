// One communicator's state for calls through windows.
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
