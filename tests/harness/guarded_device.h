// A device for tests: host memory that the host can't access. Its pages are protected except while a stream runs work,
// so a host that reads or writes a tensor without host_access.h crashes, as it would (or worse, would not) with a GPU.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/device_runtime.h"
#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::harness {

struct GuardedOptions {
  /// The device's kernels; null: the host's kernels.
  std::unique_ptr<nn::DeviceKernels> (*kernels)(const nn::KernelResources&) = nullptr;
  /// Streams run nothing until a caller queries or waits for a later event, as a GPU may be arbitrarily late: a missing
  /// dependency reads stale data.
  bool lazy = false;
  /// The copy stream of this number, in order of creation, waits for no event, which simulates a missing dependency.
  /// Lazy only.
  int deaf_copy_stream = -1;
  bool shares_memory = true;
  /// The device fails to open memory that other ranks exported, as in a container that refuses it.
  bool refuses_imports = false;
  /// Copies between memory of devices take this long. Lazy only.
  std::chrono::milliseconds slow_copies{0};
};

/// Memory that a guarded device has exported and imported.
struct GuardedSharing {
  int exported = 0;         ///< blocks, at present
  int imported = 0;         ///< blocks, at present
  int imports = 0;          ///< in total
  int freed_too_early = 0;  ///< blocks that were freed while they were imported
};
GuardedSharing sharing_of(const base::DeviceRuntime& guarded);

/// Calls that block the calling thread, or would with a GPU.
struct HostWaits {
  std::uint64_t events = 0;  ///< waits for an event, a stream or the device
  std::uint64_t copies = 0;  ///< copies from or to memory of the host that is not pinned
  std::uint64_t memory = 0;  ///< allocations and frees of device or pinned memory
  bool operator==(const HostWaits&) const = default;
  HostWaits operator-(const HostWaits& earlier) const {
    return {events - earlier.events, copies - earlier.copies, memory - earlier.memory};
  }
};

/// Waits of the calling thread on all guarded devices since the thread started.
HostWaits host_waits();

/// The profiler ranges of the calling thread.
struct Ranges {
  std::vector<std::string> begun;  ///< "WHAT UNIT", after two spaces for each enclosing range
  int open = 0;                    ///< begun and not ended; below 0: more ends than begins
};
/// Returns the ranges and clears the names; open ranges stay open.
Ranges drain_ranges();

/// The device is named cuda:0. Thread-safe: it serializes the threads that use it. It outlives the buffers that it
/// allocates.
std::shared_ptr<base::DeviceRuntime> make_guarded_device(GuardedOptions options = {});

}  // namespace tessera::harness
