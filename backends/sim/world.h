// A simulated network: a communicator whose operations move nothing and take the time that a model says.
//
// One process, one rank: the program is the same on all of them (SPMD), so that one stands for all. It is the last one,
// by which the sizes of splits are known (see make_world). Memory of device meta is not looked at. Of the host's the
// result is what it would be if every other rank had called with this rank's values: what ranks only compare, agrees.
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

/// One operation, for those who say how long it takes.
struct SimulatedOp {
  OpKind kind = OpKind::barrier;
  std::uint64_t bytes = 0;       ///< of the larger buffer; a batch's parts are added up
  std::uint64_t bytes_sent = 0;  ///< by this rank: comm::direct_bytes_sent
  int ranks = 1;
};

struct Network {
  std::function<std::chrono::nanoseconds(const SimulatedOp&)> time;
  /// Operations of one communicator begin when the one before is done; false: each begins when it is called, as under
  /// the decorator `delay`.
  bool in_order = true;
};

/// Every rank has a link of `bytes_per_second` each way, and `latency` is from any to any: a collective takes what its
/// longest chain of messages takes, plus what its rank sends (Hockney's model; the direct algorithms: one message a
/// peer, all at a time, all_reduce in two rounds). Operations of one communicator do not share links with those of
/// another.
TESSERA_API Network alpha_beta(std::chrono::nanoseconds latency, double bytes_per_second);

/// As it was measured, by operation and bytes of the larger buffer, for the number of ranks that it was measured with.
/// Throws InvalidUsage, when it is asked for it, for an operation that was not.
TESSERA_API Network measured(std::map<OpKind, CostTable> seconds);

/// Rank `ranks` - 1 of so many; `clock` outlives it and made the streams that are given to its operations. It is the
/// last in all communicators split from it, too, and their keys are 0, 1, ... without gaps, so that a split has key + 1
/// ranks: as a mesh does. Never fails; abort() makes later calls throw Aborted.
TESSERA_API std::unique_ptr<Communicator> make_world(int ranks, VirtualClock& clock, Network network,
                                                     CommunicatorOptions options = {});

}  // namespace tessera::comm::sim
