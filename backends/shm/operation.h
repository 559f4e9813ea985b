// One operation in flight: a state machine that the progress engine advances.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "backends/shm/member_blocks.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/core/op_traits.h"
#include "tessera/comm/core/operation.h"
#include "tessera/comm/slices.h"

namespace tessera::comm::shm {

/// Whether data that other ranks read is written past this core's caches.
///
/// Memory that another core has read is in that core's caches, and a plain store must first invalidate it there, line
/// by line. That takes twice as long as the copy itself if the other core has the line in a cache of its own, and ten
/// times as long if the two cores have no cache in common: other sockets, other parts of a chip, or virtual cores that
/// were placed so for the moment. Streaming stores do not wait for it, but leave the data in memory, from where its
/// readers fetch it. So both kinds are timed, by what is written and by the size of the operation, and streaming ones
/// are used where they save enough; now and then the other kind is tried. The values written are the same. Used by one
/// thread at a time.
class StoreChoice {
 public:
  enum class Target : std::uint8_t { tile, copy, reduced_result, copied_result };

  /// `own_cores`: each rank has one. Ranks that share a core find each other's tiles in its caches.
  explicit StoreChoice(bool own_cores) : own_cores_(own_cores) {}

  /// Calls write_block(streams) for a block of `bytes` of an operation of `operation_bytes`.
  template <class Write>
  void write(Target target, std::size_t operation_bytes, std::size_t bytes, const Write& write_block) {
    if (bytes < kMinBytes) return write_block(false);
    const bool streams = next(target, operation_bytes);
    const auto begin = std::chrono::steady_clock::now();
    write_block(streams);
    const std::chrono::duration<float, std::nano> time = std::chrono::steady_clock::now() - begin;
    add(target, operation_bytes, streams, time.count() / static_cast<float>(bytes));
  }

  // The parts of write():
  /// Whether the next block is written with streaming stores.
  bool next(Target target, std::size_t operation_bytes) noexcept;
  /// Adds the time of a block, in ns a byte.
  void add(Target target, std::size_t operation_bytes, bool streams, float time) noexcept;

 private:
  static constexpr std::size_t kMinBytes = std::size_t{16} << 10;  ///< a look at the clock and a fence cost more
  static constexpr std::size_t kSizes = 33;                        ///< powers of 2; the last one and all above
  static constexpr std::size_t kKept = 3;                          ///< times: a rank may lose its core during one

  /// Of plain and of streaming stores.
  struct Times {
    std::array<std::array<float, kKept>, 2> last{};
    std::array<std::uint32_t, 2> count{};
    std::uint32_t blocks = 0;  ///< since both were timed
    bool streams = false;      ///< what is used
  };
  float needed_gain(Target target) const noexcept;
  Times& times_of(Target target, std::size_t operation_bytes) noexcept;

  const bool own_cores_;
  std::array<std::array<Times, kSizes>, 4> times_{};
};

/// Which rank reads what from which rank: one rank's view of one call, in elements.
class CollectiveLayout {
 public:
  CollectiveLayout(int rank, int ranks) : rank_(rank), ranks_(ranks) {}
  /// `all_inputs`: an all_reduce in which every rank reads all inputs.
  void reset(const OpDesc& call, bool all_inputs);

  int rank() const noexcept { return rank_; }
  int ranks() const noexcept { return ranks_; }
  bool symmetric() const noexcept { return symmetric_; }
  bool shares_input() const;                             ///< all readers read the same part of this rank's input
  bool reduces() const { return comm::reduces(kind_); }  ///< readers combine the sources; else they copy them
  Slice read_slice(int source) const;                    ///< what this rank reads from the input of `source`
  Slice sent_slice(int reader) const;                    ///< what `reader` reads of this rank's input
  std::size_t output_offset(int source) const;           ///< where the data of `source` goes in this rank's output
  Slice owned_slice(int owner) const;                    ///< all_reduce: what `owner` computes
  bool second_half() const { return kind_ == OpKind::all_reduce && !symmetric_; }
  /// Bytes that decide between the eager and the tiled algorithm; the same on all ranks. None: always tiled.
  std::size_t eager_size() const;
  bool sends_input() const;  ///< peers read this rank's input
  bool ragged() const { return !in_starts_.empty() || !out_starts_.empty(); }
  std::uint64_t fingerprint(const ReduceOp& op) const;  ///< what must be equal on all ranks
  std::uint64_t table_count() const;                    ///< elements in the table of a mismatch

 private:
  const int rank_;
  const int ranks_;
  OpKind kind_ = OpKind::barrier;
  DType dtype_ = DType::f32;
  int root_ = 0;
  std::size_t in_count_ = 0;
  std::size_t out_count_ = 0;
  std::vector<std::size_t> in_starts_;  ///< the _v forms: ranks + 1 offsets
  std::vector<std::size_t> out_starts_;
  bool symmetric_ = false;
};

class ShmOperation final : public Operation {
 public:
  enum class Stage : std::uint8_t { queued, announced, running, draining, done };

  explicit ShmOperation(const MemberBlocks& members) : layout(members.rank(), members.size()) {}
  void reset(const OpDesc& what, std::uint64_t number, bool all_inputs = false);

  std::uint64_t rounds_for(std::size_t count) const;
  std::uint64_t rounds_sent() const;  ///< until every reader has its data from this rank
  bool fills() const { return stages_in || copied_in; }
  /// Peers read memory of the caller or tiles, which stay valid only until the operation is done.
  bool awaits_readers() const { return (layout.sends_input() && !copied_in) || (layout.second_half() && !copied_out); }
  /// A small operation is done once the ranks that it reads from have arrived.
  bool awaits(int peer) const { return everyone || layout.read_slice(peer).count > 0; }
  /// Copies what peers read of this rank's input to the same places in `to`.
  void copy_sent(std::byte* to, StoreChoice& stores) const;

  CollectiveLayout layout;
  std::uint64_t fingerprint = 0;
  Stage stage = Stage::queued;
  bool eager = false;
  bool everyone = false;  ///< done only when all ranks have arrived
  bool stages_in = false;
  bool cma_in = false;      ///< peers read the input from this process
  bool cma_out = false;     ///< ... or the results of the first half
  bool copied_in = false;   ///< peers read a copy of the input
  bool copied_out = false;  ///< ... or of the results of the first half
  bool stages_out = false;
  bool any_staged = false;
  bool any_awaits = false;  ///< a peer waits until this rank has read
  bool streaming = false;
  int arrived = 0;            ///< ranks 0 .. arrived - 1 have arrived
  std::uint64_t staged = 0;   ///< rounds
  std::uint64_t reduced = 0;  ///< rounds
  std::uint64_t round_bytes = 0;
  std::vector<std::uint64_t> copied_inputs;   ///< rounds, by source
  std::vector<std::uint64_t> copied_results;  ///< rounds, by source
};

}  // namespace tessera::comm::shm
