// The eager algorithm for small collectives: the announcement carries the payload, so one exchange suffices.
#pragma once

#include <vector>

#include "backends/shm/member_blocks.h"
#include "backends/shm/operation.h"

namespace tessera::comm::shm {

class EagerCollective {
 public:
  explicit EagerCollective(const MemberBlocks& members)
      : members_(members),
        sources_(static_cast<std::size_t>(members.size())),
        factors_(static_cast<std::size_t>(members.size())) {}
  /// Reduces or copies the payloads of all ranks that `op` awaits, which have arrived.
  void run(const ShmOperation& op);

 private:
  const MemberBlocks& members_;
  std::vector<const void*> sources_;  ///< by member
  std::vector<double> factors_;       ///< premul_sum: by member
};

}  // namespace tessera::comm::shm
