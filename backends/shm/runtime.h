// The state that all communicators of one rank share: its arenas, its peers' arenas, the board with the doorbells of
// all ranks, and the progress engine.
#pragma once

#include <sched.h>

#include <array>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "backends/shm/arena.h"
#include "tessera/comm/algorithms.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/core/progress.h"
#include "tessera/comm/registry.h"

namespace tessera::comm::shm {

/// One rank's entry on the board, the only memory that all ranks write.
struct RankRecord {
  Doorbell bell;
  alignas(128) std::atomic<std::uint32_t> left{0};  ///< has closed its world in good order
  std::atomic<std::uint32_t> lost{0};               ///< died; set by the rank that detects it
  std::atomic<std::int32_t> pid{0};
  std::array<char, 400>
      first_failure_cause{};  ///< first failure of a rank that has left, zero-terminated; written before `left`
};

class ShmRuntime final : public Pollable {
 public:
  static std::shared_ptr<ShmRuntime> make(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options);
  ~ShmRuntime() override;
  bool poll(bool with_health_check) noexcept override;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return static_cast<int>(windows_.mapped.size()); }
  Arena& arena() noexcept { return *windows_.own; }
  const std::byte* window(int world_rank) const noexcept { return windows_.of(world_rank); }
  /// For the control data of the ranks.
  Arena& staging() noexcept { return *staging_.own; }
  std::byte* staging(int world_rank) const noexcept { return staging_.of(world_rank); }
  RankRecord& board(int world_rank) const noexcept { return reinterpret_cast<RankRecord*>(board_->data())[world_rank]; }
  ProgressEngine& engine() noexcept { return *engine_; }
  const BackendOptions& options() const noexcept { return options_; }
  const AlgorithmTable& algorithms() const noexcept { return algorithms_; }
  const Capabilities& capabilities() const noexcept { return capabilities_; }
  std::size_t cache_bytes() const noexcept { return cache_bytes_; }
  /// Whether so many ranks can have a core each. `cores`: which they may run on; a launcher may bind each rank to one.
  static bool enough_cores(std::span<const cpu_set_t> cores, int ranks);
  bool has_own_cores() const noexcept { return has_own_cores_; }
  /// Whether all ranks can read each other's ordinary memory (cma.h).
  bool uses_cma() const noexcept { return uses_cma_; }
  /// Starts to watch for the death of other ranks. Call it after the last exchange of the bootstrap.
  void watch();
  /// Marks this rank's world as closed, so that waiting peers may stop.
  void leave() noexcept;

  /// Keeps the memory of a closed communicator while a member may use it.
  struct RetiredBlock {
    std::size_t members = 0;
    Buffer head;  ///< a ControlHeader, whose `done` becomes `members`
    Buffer slots;
    Buffer tiles;
    std::array<Buffer, 2> copies;
    std::vector<Buffer> message_tiles;
  };
  void retire(RetiredBlock retired);

 private:
  struct Arenas {
    std::shared_ptr<Arena> own;
    std::vector<std::shared_ptr<Mapping>> mapped;  ///< by world rank
    std::byte* of(int world_rank) const noexcept { return mapped[static_cast<std::size_t>(world_rank)]->data(); }
  };
  ShmRuntime(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options);
  void connect();
  void exchange_objects();
  void exchange_segments();

  const int rank_;
  const BackendOptions options_;
  const Capabilities capabilities_;
  const AlgorithmTable algorithms_;
  std::size_t cache_bytes_ = 0;
  bool has_own_cores_ = false;
  bool uses_cma_ = false;
  std::shared_ptr<Bootstrap> bootstrap_;
  std::unique_ptr<ControlChannel> channel_;
  Arenas windows_;
  Arenas staging_;
  std::shared_ptr<Mapping> board_;
  std::mutex retired_mutex_;
  std::vector<RetiredBlock> retired_;
  std::unique_ptr<ProgressEngine> engine_;
};

}  // namespace tessera::comm::shm
