// A communicator that injects a fault at one call of one rank.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "tessera/comm/communicator.h"

namespace tessera::harness {

enum class FaultKind : std::uint8_t {
  drop,     ///< the call never reaches other ranks; waits for it end with Timeout at its deadline, as on those ranks
  kill,     ///< this process kills itself (SIGKILL) instead
  corrupt,  ///< one bit of the result is flipped; of the sent data if the call has no result on this rank
};

struct Fault {
  FaultKind kind = FaultKind::drop;
  /// From 1, over the communicator and all that are split from it, so that it means the same in every run; a batch is
  /// one call.
  std::uint64_t call = 1;
  std::optional<int> rank = {};  ///< of the world; empty: every rank
};

/// Corruption requires host memory: the call throws Unsupported for other memory, and InvalidUsage if it has no
/// elements.
std::unique_ptr<comm::Communicator> inject(std::unique_ptr<comm::Communicator> world, const Fault& fault);

}  // namespace tessera::harness
