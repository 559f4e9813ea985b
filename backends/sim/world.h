// A simulated network: a communicator whose operations move no data and take the time that a model predicts.
//
// One process simulates one rank: the program is the same on all ranks (SPMD), so one represents all. It is the last
// rank, which determines the sizes of splits (see make_world). Memory of device meta is not accessed. Results in host
// memory are as if every other rank had called with this rank's values, so values that the ranks only compare agree.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "tessera/comm/base_names.h"
#include "tessera/base/cost_table.h"
#include "tessera/base/export.h"
#include "tessera/base/virtual_clock.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm::sim {

/// One operation, as passed to a time model.
struct SimulatedOp {
  OpKind kind = OpKind::barrier;
  std::uint64_t bytes = 0;       ///< of the larger buffer; summed over the operations of a batch
  std::uint64_t bytes_sent = 0;  ///< by this rank: comm::direct_bytes_sent
  int ranks = 1;
};

struct Network {
  std::function<std::chrono::nanoseconds(const SimulatedOp&)> time;
  /// True: an operation of a communicator starts when the previous one is done. False: each starts when it is called,
  /// as under the decorator `delay`.
  bool in_order = true;
};

/// Every rank has a link of `bytes_per_second` in each direction, and `latency` applies between any two ranks: a
/// collective takes the time of its longest chain of messages plus that of the bytes its rank sends (Hockney's model;
/// the direct algorithms: one message per peer, all concurrent, all_reduce in two rounds). Operations of different
/// communicators do not share links.
TESSERA_API Network alpha_beta(std::chrono::nanoseconds latency, double bytes_per_second);

/// Measured times, by operation and bytes of the larger buffer, for the number of ranks of the measurement. A query for
/// an operation that was not measured throws InvalidUsage.
TESSERA_API Network measured(std::map<OpKind, CostTable> seconds);

/// Creates rank `ranks` - 1 of a world of `ranks`. `clock` outlives it and has created the streams passed to its
/// operations. The rank is also the last one in all communicators split from it, and their keys are 0, 1, ... without
/// gaps, so that a split has key + 1 ranks, as in a mesh. Never fails; abort() makes later calls throw Aborted.
TESSERA_API std::unique_ptr<Communicator> make_world(int ranks, VirtualClock& clock, Network network,
                                                     CommunicatorOptions options = {});

}  // namespace tessera::comm::sim
