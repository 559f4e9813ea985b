// Device memory on a host communicator: directly between ranks where possible (IPC), otherwise through host memory.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "tessera/base/device_runtime.h"
#include "tessera/base/export.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// Settings of stage().
struct StagingOptions {
  /// How many bytes of a call are copied, moved and copied back at once. The same on all ranks.
  std::size_t chunk_bytes = std::size_t{2} << 20;
  /// Chunks of one call at a time: one copied down, one between the ranks, one copied up.
  std::size_t chunks_in_flight = 3;
  /// Ranks of a host read each other's memory from allocate(), if their devices can. All ranks or none.
  bool ipc = true;
  /// The ranks agree on `ipc`. False: stage() is not collective, and memory moves through host memory only.
  bool negotiates_ipc = true;
  /// Algorithms in the grammar of TESSERA_ALGO: a call for which they name another one than `direct` is staged.
  std::string algorithms = {};
};

/// Creates a communicator of `inner`'s ranks that also supports memory of `device`; calls with host memory are passed
/// on to `inner` unchanged. All ranks of a call use memory of the same kind, even without elements. Deadlines, errors
/// and order are inner's. Collective if ranks may share a host and agree on IPC.
///
/// Ranks of one host read each other's memory from allocate(), if the devices can; bits and bytes are those of the
/// `direct` algorithms, and last_algorithm() is "ipc". Otherwise data moves through pinned host memory in chunks, so
/// that copies and transport overlap: bytes are inner's, and in deterministic mode the results equal those of one whole
/// call bit for bit. Operation numbers in errors count chunks and control operations between the ranks.
///
/// A calling thread never waits for the device: a thread of its own progresses calls, and so do threads that wait for
/// one. Work::wait_on() a stream of the device works like the device's signals (DeviceRuntime::make_signal()).
TESSERA_API std::unique_ptr<Communicator> stage(std::unique_ptr<Communicator> inner,
                                                std::shared_ptr<DeviceRuntime> device, StagingOptions options = {});

}  // namespace tessera::comm
