// Sums over memory of several ranks that one device can read: what staging asks a device for.
#pragma once

#include <cstddef>
#include <string_view>

#include "tessera/base/stream.h"
#include "tessera/comm/types.h"

namespace tessera::comm {

/// As reduce_tree() (reduce.h), with the same bits, but in memory of a device. Source k's elements begin at sources[k];
/// `out` may be one of them. `factors` has an entry for each source, which only premul_sum looks at; avg's divisor is
/// in `op`. The two arrays are the host's and are not looked at after the call.
struct DeviceReduceArgs {
  ReduceOp op;
  DType dtype;
  const void* const* sources;
  const double* factors;
  int source_count;
  void* out;
  std::size_t count;  ///< elements
};

/// What a device has for this: DeviceRuntime::find<DeviceReduceKernels>(), to be called while no stream waits for
/// anything: it makes ready what append() needs. Thread-safe but for the stream.
struct DeviceReduceKernels {
  static constexpr std::string_view kInterface = "comm.sums";
  static constexpr int kMostSources = 128;  ///< of one sum
  /// Appends the sum. Throws BackendError.
  void (*append)(Stream& stream, const DeviceReduceArgs& sum);
};

}  // namespace tessera::comm
