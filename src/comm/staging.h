// Memory of a device on a communicator of the host: from rank to rank where they can, else by way of the host's.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "tessera/base/device_runtime.h"
#include "tessera/base/export.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm {

struct StagingOptions {
  /// How much of a call is copied, moved and copied back at once. The same on all ranks.
  std::size_t chunk_bytes = std::size_t{2} << 20;
  std::size_t chunks_in_flight = 3;  ///< of one call: one each on its way down, between the ranks, and up
  /// Ranks of a host read memory that allocate() gave from each other, where their devices can. All ranks or none.
  bool ipc = true;
  std::string algorithms;  ///< TESSERA_ALGO's grammar: a call for which it names another than `direct` is staged
};

/// A communicator of `inner`'s ranks that takes memory of `device` too; calls with memory of the host go on to `inner`
/// as they are. Every rank of a call gives memory of the same kind, also where it has no elements. Deadlines, errors
/// and order are inner's. Collective where ranks may share a host: they agree on what follows.
///
/// Ranks of one host read memory that allocate() gave from each other, if the devices can; bits and bytes are those of
/// the `direct` algorithms, and last_algorithm() is "ipc". All else passes through pinned memory of the host, in
/// chunks, so that copies and transport overlap: bytes are inner's, and in deterministic mode the results are the bits
/// of one whole call. Errors that count operations count chunks, and what the ranks tell each other.
///
/// No thread that calls waits for the device: a thread of its own moves calls on, and whoever waits for one.
/// Work::wait_on() a stream of the device works as the device's signals do (DeviceRuntime::make_signal()).
TESSERA_API std::unique_ptr<Communicator> stage(std::unique_ptr<Communicator> inner,
                                                std::shared_ptr<DeviceRuntime> device, StagingOptions options = {});

}  // namespace tessera::comm
