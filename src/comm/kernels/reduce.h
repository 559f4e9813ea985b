// Reductions over several sources, and copies: the arithmetic of all host backends, and what staging uses of a
// device's.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "tessera/base/dtype.h"
#include "tessera/base/export.h"
#include "tessera/base/stream.h"
#include "tessera/comm/types.h"

namespace tessera::comm {

/// The most ranks that one communicator may have.
inline constexpr std::size_t kMaxRanks = 1024;

/// Bytes that a streaming store writes at once.
inline constexpr std::size_t kStreamLine = 64;

/// The arguments that reduce_tree() passes to its kernels.
struct ReduceTask {
  ReduceOp op;
  DType dtype;
  std::span<const void* const> sources;
  std::span<const double> factors;
  void* out;
  std::size_t count;
  bool streaming;  ///< only where `out` begins on a cache line
};

/// out[i] = op over k of sources[k][i], following the tree of slices.h over the order of the sources; f16 and bf16 are
/// computed in f32 and rounded once, in the default FpEnvironment. The bits don't depend on alignment, position or
/// machine, except which payload a NaN has. `out` may be one of the sources; otherwise it must overlap none.
/// `op.scalar` must hold avg's divisor; `factors` has one entry per source for premul_sum, otherwise it is ignored.
/// `streaming` uses stores that bypass the caches, for working sets much larger than these.
TESSERA_API void reduce_tree(const ReduceOp& op, DType dtype, std::span<const void* const> sources,
                             std::span<const double> factors, void* out, std::size_t count, bool streaming = false);

/// memcpy; `streaming` as above.
TESSERA_API void copy_bytes(void* out, const void* in, std::size_t bytes, bool streaming);

/// As reduce_tree(), with the same bits, but in device memory. Source k's elements begin at sources[k];
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
