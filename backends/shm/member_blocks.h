// The control blocks and the memory of a communicator's members, as this rank maps them.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backends/shm/control_block.h"
#include "backends/shm/runtime.h"
#include "tessera/comm/core/group_core.h"
#include "tessera/comm/core/operation.h"
#include "tessera/comm/failure.h"
#include "tessera/comm/transport/cma.h"

namespace tessera::comm::shm {

class MemberBlocks {
 public:
  /// Where a member's control block lies in its staging arena.
  struct Offsets {
    std::size_t head = 0;
    std::size_t slots = 0;
  };

  /// Allocates this rank's control block. `sent` counts what this rank sends.
  MemberBlocks(ShmRuntime& runtime, int rank, std::vector<int> world_ranks, std::shared_ptr<MemoryTracker> tracker,
               TrafficCounters& sent);
  Offsets own_offsets() const;
  /// `offsets` of all members.
  void connect(std::span<const Offsets> offsets);
  /// Hands over the memory of this rank's control block.
  ShmRuntime::RetiredBlock retire();

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  ShmRuntime& runtime() const noexcept { return runtime_; }
  const ControlBlock& of(int member) const { return blocks_[static_cast<std::size_t>(member)]; }
  const ControlBlock& own() const { return of(rank_); }
  const std::byte* window(int member) const { return runtime_.window(world_rank(member)); }
  const std::byte* staging(int member) const { return runtime_.staging(world_rank(member)); }
  RankRecord& record(int member) const { return runtime_.board(world_rank(member)); }
  /// Copies from the memory of a member's process. False: it is gone. Throws as cma_read().
  bool read(int member, const void* from, void* to, std::size_t bytes) const {
    const int rank = runtime_.options().global_rank(world_rank(member));
    return cma_read(record(member).pid.load(), rank, from, to, bytes);
  }
  /// Wakes the other members, or one.
  void ring_all() const noexcept;
  void ring(int member) const noexcept { comm::ring(record(member).bell); }
  /// The factor of each member, if `op` is a premul_sum; all have announced it.
  void read_factors(const Operation& op, std::span<double> factors) const;
  MemoryTracker& memory_tracker() const noexcept { return *memory_tracker_; }
  /// Memory that the other members can read.
  Buffer allocate(std::size_t bytes) const;

  /// Counts bytes read from a peer's memory, in this rank's control block, where the peer finds them.
  void count_read(const Operation& op, int source, std::size_t bytes) const noexcept {
    if (!op.internal && source != rank_)
      TrafficCounters::add(own().credit(source).bytes[static_cast<std::size_t>(op.call.kind)], bytes);
  }
  /// Counts bytes sent in a payload or a tile, where the operation may be done before the peer has read them.
  void count_sent(const Operation& op, int reader, std::size_t bytes) const noexcept {
    if (!op.internal && reader != rank_) sent_.add(op.call.kind, reader, bytes);
  }
  /// Adds what the peers have read from this rank.
  void read_traffic(TrafficStats& stats) const;

 private:
  int world_rank(int member) const { return world_ranks_[static_cast<std::size_t>(member)]; }

  ShmRuntime& runtime_;
  const int rank_;
  const int size_;
  const std::vector<int> world_ranks_;
  const std::shared_ptr<MemoryTracker> memory_tracker_;
  TrafficCounters& sent_;
  Buffer head_;
  Buffer slots_;
  std::vector<ControlBlock> blocks_;
};

/// How a rank learns from shared memory that a peer has failed, died or left, and how far it is.
class SharedPeerMonitor {
 public:
  explicit SharedPeerMonitor(const MemberBlocks& members) : members_(members) {}

  /// True if a peer has published a failure on this communicator. Inline, since every call asks.
  bool any_failure() const noexcept {
    for (int k = 0; k < members_.size(); ++k)
      if (k != members_.rank() && members_.of(k).head().failure.state.load() != 0) return true;
    return false;
  }
  /// The failure that a peer has published on this communicator, if any.
  std::optional<Failure> published_failure() const;
  /// Publishes this rank's failure, which is the first.
  void publish(const Failure& failure) const noexcept;

  /// "died (process 12)"; "" while the peer lives.
  std::string death(int member) const;
  bool has_left(int member) const { return members_.record(member).left.load() != 0; }
  /// Its first failure, if it has left after one.
  std::string first_failure_cause(int member) const { return members_.record(member).first_failure_cause.data(); }

  /// Asks all members for a sign of life. False: the member does not respond in time.
  std::vector<bool> ping_all() const;

 private:
  const MemberBlocks& members_;
};

}  // namespace tessera::comm::shm
