// What the members announce when a collective begins: their call, and where peers find their data.
#pragma once

#include <string>

#include "backends/shm/collective_buffers.h"
#include "backends/shm/member_blocks.h"
#include "backends/shm/operation.h"

namespace tessera::comm::shm {

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
