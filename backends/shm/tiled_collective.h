// The tiled algorithm of the collectives.
//
// Every operation is divided into rounds. A rank's data is either in a window, where all rounds are available from the
// start, or it goes through a few tiles that are used in turn. Readers follow the flags of each source independently,
// so windows and other memory may be mixed freely over the ranks. all_reduce: rank j computes slice j (first half),
// then every rank reads all slices (second half).
#pragma once

#include <vector>

#include "backends/shm/collective_buffers.h"
#include "backends/shm/member_blocks.h"
#include "backends/shm/operation.h"

namespace tessera::comm::shm {

class TiledCollective {
 public:
  TiledCollective(const MemberBlocks& members, CollectiveBuffers& buffers);

  /// Does what needs no peer while `op` awaits their announcements. True: it progressed.
  bool prepare(ShmOperation& op) { return stage_input(op) || copy_own(op); }
  /// All ranks that `op` awaits have announced it.
  void begin(ShmOperation& op);
  /// Runs one bounded piece of whatever work is possible; the stage of `op` is `done` after the last one. True: it
  /// progressed.
  bool advance(ShmOperation& op);

 private:
  struct PeerBuffers {               ///< what the peers of the first queued collective announced
    const std::byte* in = nullptr;   ///< null: staged
    bool cma_in = false;             ///< `in` is an address in the peer's process
    const std::byte* out = nullptr;  ///< null: staged
    bool cma_out = false;
    const std::byte* tiles = nullptr;
    bool all_there = false;   ///< all rounds of `in`
    bool copied_in = false;   ///< `in` is a copy whose owner has counted its reads
    bool copied_out = false;  ///< the same for `out`
  };
  bool stage_input(ShmOperation& op);
  bool reduce_round(ShmOperation& op);
  void copy_for_readers(const ShmOperation& op, std::byte* to, const std::byte* from, std::size_t bytes, bool tile);
  bool copy_own(ShmOperation& op);
  bool copy_round(ShmOperation& op);
  static bool overwrites_input(const ShmOperation& op);
  bool copy_results(ShmOperation& op);
  bool is_done(const ShmOperation& op) const;
  bool await_readers(ShmOperation& op);
  void publish(std::atomic<std::uint64_t>& flag, const ShmOperation& op, std::uint64_t rounds) noexcept;
  std::uint64_t slowest_reader(const ShmOperation& op, bool results) const;
  std::uint64_t rounds_there(const ShmOperation& op, int source) const;
  const std::byte* source_block(const ShmOperation& op, int source, Slice whole, std::uint64_t round) const;
  PeerBuffers& peer(int member) { return peers_[static_cast<std::size_t>(member)]; }
  const PeerBuffers& peer(int member) const { return peers_[static_cast<std::size_t>(member)]; }

  const MemberBlocks& members_;
  CollectiveBuffers& buffers_;
  const int rank_;
  const int size_;
  std::vector<PeerBuffers> peers_;
  std::vector<const void*> sources_;  ///< by member
  std::vector<double> factors_;       ///< premul_sum: by member
};

}  // namespace tessera::comm::shm
