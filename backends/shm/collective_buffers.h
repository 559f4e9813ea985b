// Where the peers find this rank's data during a collective: in a window, a copy, tiles, or this process.
#pragma once

#include <array>

#include "backends/shm/member_blocks.h"
#include "backends/shm/operation.h"
#include "backends/shm/store_choice.h"

namespace tessera::comm::shm {

/// Tiles of each kind, used in turn.
inline constexpr std::uint64_t kTiles = 4;

class CollectiveBuffers {
 public:
  explicit CollectiveBuffers(const MemberBlocks& members)
      : members_(members), stores_(members.runtime().has_own_cores()) {}

  /// Decides how peers read the input and the results of `op`, and provides the memory for it.
  void choose(ShmOperation& op);
  /// The offsets that are announced: kViaTiles, kViaCma, or in an arena.
  std::uint64_t input_offset(const ShmOperation& op) const;
  std::uint64_t result_offset(const ShmOperation& op) const;
  std::uint64_t tiles_offset() const;

  /// The copy of the input or of the results, from byte `offset` on.
  std::byte* copy(const ShmOperation& op, std::size_t offset = 0) { return copy_of(op).bytes_at(offset); }
  /// Layout of the tiles: kTiles for the inputs, each with a part for every reader; then kTiles for the results.
  std::size_t tile_offset(const ShmOperation& op, std::uint64_t round, int reader, bool result) const;
  std::byte* own_tile(const ShmOperation& op, std::uint64_t round, int reader, bool result) {
    return tiles_.bytes_at(tile_offset(op, round, reader, result));
  }
  /// For what is copied to this memory.
  StoreChoice& stores() noexcept { return stores_; }
  /// Hands over the memory.
  void retire(ShmRuntime::RetiredBlock& retired);

 private:
  std::size_t tile_bytes() const { return members_.size() <= 8 ? 64 * 1024 : 16 * 1024; }
  void choose_sources(ShmOperation& op) const;
  std::uint64_t offset_of(bool staged, bool cma, bool copied, const ShmOperation& op, const void* memory) const;
  Buffer& copy_of(const ShmOperation& op) { return copies_[op.sequence % 2]; }

  const MemberBlocks& members_;
  std::array<Buffer, 2> copies_;  ///< of inputs and results for peers, alternating; created on first use
  Buffer tiles_;                  ///< created by the first operation that needs them
  StoreChoice stores_;
};

}  // namespace tessera::comm::shm
