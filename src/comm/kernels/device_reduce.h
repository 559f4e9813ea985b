// Reductions over memory of several ranks that one device can read, as staging uses them.
#pragma once

#include <cstddef>
#include <string_view>

#include "tessera/base/stream.h"
#include "tessera/comm/types.h"

namespace tessera::comm {

/// As reduce_tree() (reduce.h), with the same bits, but in device memory. Source k's elements begin at sources[k];
/// `out` may be one of the sources. `factors` has an entry for each source, which only premul_sum reads; avg's divisor
/// is in `op`. Both arrays are in host memory and are not read after the call.
struct DeviceReduceArgs {
  ReduceOp op;
  DType dtype;
  const void* const* sources;
  const double* factors;
  int source_count;
  void* out;
  std::size_t count;  ///< elements
};

/// A device's kernels for this, from DeviceRuntime::find<DeviceReduceKernels>(), which prepares what append() needs and
/// must be called while no stream waits. Thread-safe except for the stream.
struct DeviceReduceKernels {
  static constexpr std::string_view kInterface = "comm.sums";
  static constexpr int kMaxSources = 128;  ///< of one sum
  /// Appends the reduction to `stream`. Throws BackendError.
  void (*append)(Stream& stream, const DeviceReduceArgs& sum);
};

}  // namespace tessera::comm
