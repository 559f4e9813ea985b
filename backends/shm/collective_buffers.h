// Where the peers find this rank's data during a collective: in a window, a copy, tiles, or this process; and what the
// members announce when it begins.
#pragma once

#include <array>
#include <string>

#include "backends/shm/member_blocks.h"
#include "backends/shm/operation.h"

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

/// What the members announce when a collective begins: their call, and where peers find their data.
class Announcements {
 public:
  Announcements(const MemberBlocks& members, CollectiveBuffers& buffers) : members_(members), buffers_(buffers) {}

  /// True if all ranks have announced the previous operation, hence are done with the one before it, whose slot this
  /// one reuses.
  bool has_room(const ShmOperation& op);
  /// Fetches the cache lines that an eager operation will publish its payload in: the readers of an earlier one share
  /// them, and to take them back in publish() would cost more than all else there.
  void prefetch(const ShmOperation& op) const;
  /// Announces `op` to the peers.
  void publish(ShmOperation& op);
  /// Looks for the announcements of the peers that `op` awaits; its stage is `running` once all are there. Throws
  /// Mismatch if the ranks call different operations. True: it progressed.
  bool read(ShmOperation& op);
  /// The last collective that this member has announced.
  std::uint64_t last(int member) const;

 private:
  void publish_buffers(ShmOperation& op, CollectiveSlot& slot);
  bool matches(const ShmOperation& op) const;
  std::string mismatch(const ShmOperation& op) const;

  const MemberBlocks& members_;
  CollectiveBuffers& buffers_;
  std::uint64_t all_announced_ = 0;  ///< all ranks have announced this operation
};

}  // namespace tessera::comm::shm
