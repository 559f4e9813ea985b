// A simulated network: a communicator whose operations move no data and take the time that a model predicts.
//
// One process simulates one rank: the program is the same on all ranks (SPMD), so one represents all. It is the last
// rank, which determines the sizes of splits (see make_world). Memory of device meta is not accessed. Results in host
// memory are as if every other rank had called with this rank's values, so values that the ranks only compare agree.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/communicator.h"
#include "tessera/plan/network.h"
#include "tessera/plan/virtual_clock.h"

namespace tessera::plan {

/// One operation that the simulated rank has called, and when.
struct TransferRecord {
  SimulatedOp operation;       ///< what was called
  TaskId task = 0;             ///< task in the clock's graph
  std::int64_t called_ns = 0;  ///< when everything that it waits for on this rank was done
  std::int64_t begun_ns = 0;   ///< when its first byte had a link: later if operations before it were in the way
  std::int64_t done_ns = 0;    ///< when it was done
  std::string label;  ///< OpOptions::label, of a batch that of its first part: of the engine's operations, the unit
};

/// Creates rank `ranks` - 1 of a world of `ranks`. `clock` outlives it, has created the streams passed to its
/// operations, and takes the times of its operations from `network`. The rank is also the last one in all communicators
/// split from it: their keys are 0, 1, ... without gaps, so that a split has key + 1 ranks, and a color is the lowest
/// member's rank in the communicator that is split, as in a mesh. Never fails; abort() makes later calls throw Aborted.
TESSERA_API std::unique_ptr<comm::Communicator> make_world(int ranks, VirtualClock& clock, Network network,
                                                           comm::CommunicatorOptions options = {});

/// All operations so far of the world to which `communicator` belongs, in the order of the calls. Operations of
/// communicators of one rank are not among them. Throws InvalidUsage for a communicator that is not simulated.
TESSERA_API std::vector<TransferRecord> transfers_of(const comm::Communicator& communicator);

}  // namespace tessera::plan
