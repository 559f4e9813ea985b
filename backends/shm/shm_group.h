// One communicator of one rank: its control block and those of its peers, the operations in flight, and their progress.
//
// Collectives of a communicator run one after another in call order, which is the same on all ranks. Messages between
// two ranks run beside them, in an order of their own for each pair and direction. Everything below poll() runs under
// the progress engine's lock.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "backends/shm/control_block.h"
#include "backends/shm/operation.h"
#include "backends/shm/runtime.h"

namespace tessera::comm::shm {

class ShmGroup final : public Pollable, public std::enable_shared_from_this<ShmGroup> {
 public:
  struct MemberOffsets {
    int world_rank = 0;
    std::size_t head_offset = 0;
    std::size_t slots_offset = 0;
  };
  /// Allocates this rank's control block for a group of `members`. The caller then sends its offsets to the other ranks
  /// and calls connect().
  static std::shared_ptr<ShmGroup> make(std::shared_ptr<ShmRuntime> host, int rank, int members,
                                        std::shared_ptr<MemoryTracker> memory_tracker);
  ~ShmGroup() override;
  MemberOffsets own_place() const;
  void connect(std::vector<MemberOffsets> members);
  /// Accepts no more operations and waits for those in flight.
  void close() noexcept;

  Work start(const OpDesc& call, bool internal);
  Work start_batch(std::span<const OpDesc> parts);
  void abort(std::string_view reason) noexcept;
  void read_traffic(TrafficStats& snapshot) const;
  std::string_view last_algorithm() const noexcept { return last_algorithm_; }
  ShmRuntime& host() noexcept { return *host_; }
  const std::shared_ptr<ShmRuntime>& shared_host() const noexcept { return host_; }
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  const std::shared_ptr<MemoryTracker>& memory_tracker() const noexcept { return memory_tracker_; }
  int world_rank(int member) const noexcept { return members_[static_cast<std::size_t>(member)].world_rank; }

  [[noreturn]] void throw_failure() const;
  bool poll(bool with_health_check) noexcept override;
  void put_back(ShmOperation& op) noexcept;

 private:
  struct PeerBuffers {               ///< what the peers of the first queued collective announced
    const std::byte* in = nullptr;   ///< null: staged
    bool remote_in = false;          ///< `in` is an address in the peer's process
    const std::byte* out = nullptr;  ///< null: staged
    bool remote_out = false;
    const std::byte* tiles = nullptr;
    bool all_there = false;   ///< all rounds of `in`
    bool copied_in = false;   ///< `in` is a copy whose owner has counted its reads
    bool copied_out = false;  ///< the same for `out`
  };
  static constexpr std::string_view kDirect = "direct";
  static constexpr std::string_view kSymmetric = "symmetric";
  struct MessageChannel {  ///< messages to or from one peer
    OpQueue queue;
    std::uint64_t messages = 0;  ///< begun
    std::uint64_t rounds = 0;
    bool running = false;
    Buffer tiles;
  };

  ShmGroup(std::shared_ptr<ShmRuntime> host, int rank, int members, std::shared_ptr<MemoryTracker> memory_tracker);
  ShmOperation& acquire();
  void select_protocol(ShmOperation& op) const;
  void submit(ShmOperation& op) noexcept;
  Work launch(ShmOperation& op);
  void run_alone(ShmOperation& op);
  void complete(ShmOperation& op, std::uint32_t how) noexcept;
  bool drain_submissions() noexcept;
  bool advance_first();
  void notify() noexcept;
  ControlBlock& port(int member) { return ports_[static_cast<std::size_t>(member)]; }
  ControlBlock& own() { return port(rank_); }
  const std::byte* window_of(int member) const { return host_->window(world_rank(member)); }
  const std::byte* staging_of(int member) const { return host_->staging(world_rank(member)); }
  RankRecord& board(int member) const { return host_->board(world_rank(member)); }
  /// Counts bytes read from a peer's memory, in this rank's control block, where the peer finds them.
  void credit(const ShmOperation& op, int source, std::size_t bytes) noexcept;
  /// Counts bytes sent in a payload or a tile, where the operation may be done before the peer has read them.
  void count_sent(const ShmOperation& op, int reader, std::size_t bytes) noexcept;

  // publish.cpp
  bool has_room(const ShmOperation& op);
  void announce(ShmOperation& op);
  void choose_places(ShmOperation& op);

  // tiled_collective.cpp
  bool advance_collective(ShmOperation& op);
  bool see_arrivals(ShmOperation& op);
  bool run_tiles(ShmOperation& op);
  bool stage_input(ShmOperation& op);
  std::size_t tile_bytes() const;
  std::size_t tiles_bytes() const;
  bool reduce_round(ShmOperation& op);
  bool copy_own(ShmOperation& op);
  bool copy_round(ShmOperation& op);
  bool copy_results(ShmOperation& op);
  bool finish_collective(ShmOperation& op);
  void publish(std::atomic<std::uint64_t>& flag, const ShmOperation& op, std::uint64_t rounds) noexcept;
  std::uint64_t slowest_reader(const ShmOperation& op, bool results) const;
  std::size_t tile_offset(const ShmOperation& op, std::uint64_t round, int reader, bool result) const;
  std::byte* own_tile(const ShmOperation& op, std::uint64_t round, int reader, bool result);
  std::uint64_t rounds_there(const ShmOperation& op, int source) const;
  const std::byte* source_block(const ShmOperation& op, int source, Slice whole, std::uint64_t round) const;

  // eager_collective.cpp
  void run_eager(ShmOperation& op);
  void combine(const ShmOperation& op, std::span<const void* const> sources, std::byte* out, std::size_t count);

  // point_to_point.cpp
  bool advance_send(int peer);
  bool advance_receive(int peer);
  bool advance_messages();

  // failure.cpp
  void fail(FailureKind kind, std::string_view text) noexcept;
  bool fits_others(const ShmOperation& op);
  std::string table_of(const ShmOperation& op);
  bool check_health() noexcept;
  void check_peers(const ShmOperation& op) noexcept;
  void time_out(const ShmOperation& op) noexcept;
  std::string rank_name(int member) const;
  std::string describe(const ShmOperation& op) const;
  std::uint64_t announced_by(int member) const;
  bool adopt_peer_failure() noexcept;

  std::string_view last_algorithm_ = kDirect;  ///< of the last call

  const std::shared_ptr<ShmRuntime> host_;
  const int rank_;
  const int size_;
  const std::shared_ptr<MemoryTracker> memory_tracker_;
  Buffer head_;
  Buffer slots_;
  std::array<Buffer, 2> copies_;  ///< of inputs and results for peers, alternating; created on first use
  std::uint64_t room_seen_ = 0;   ///< all ranks have announced this operation
  Buffer tiles_;                  ///< of collectives; created by the first operation that needs them
  std::vector<MemberOffsets> members_;
  std::vector<ControlBlock> ports_;
  std::vector<ByteCounts> sent_;  ///< by reader; written under the engine's lock

  std::mutex submit_mutex_;
  OpQueue submitted_;
  std::atomic<bool> any_submitted_{false};  ///< spares a poll() the lock
  std::vector<std::unique_ptr<ShmOperation>> all_ops_;
  OpQueue free_ops_;
  std::uint64_t sequence_ = 0;
  std::atomic<std::uint32_t> in_flight_{0};
  std::atomic<std::uint32_t> idle_{1};  ///< nothing is in flight; close() waits for it

  // Under the engine's lock:
  OpQueue collectives_;
  std::vector<MessageChannel> sends_;
  std::vector<MessageChannel> receives_;
  std::size_t messages_waiting_ = 0;
  std::vector<PeerBuffers> peers_;
  std::vector<const void*> sources_;
  std::vector<double> factors_;
  std::atomic<bool> failed_{false};
  FailureKind failure_ = FailureKind::none;
  std::string cause_;
};

}  // namespace tessera::comm::shm
