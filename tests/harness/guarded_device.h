// A device for tests: host memory that the host can't touch. Its pages are closed except while work of a stream runs,
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
  /// The device's kernels; null: the host's.
  std::unique_ptr<nn::DeviceKernels> (*kernels)(const nn::KernelResources&) = nullptr;
  /// Streams run nothing before somebody asks for an event behind it, as a GPU may be arbitrarily late: a dependency
  /// that was forgotten reads stale data.
  bool lazy = false;
  /// The copy stream of this number, as they are made, waits for no event: a dependency that somebody forgot. Lazy
  /// only.
  int deaf_copy_stream = -1;
  bool shares_memory = true;
  /// It can't open what others shared, as in a container that refuses it.
  bool refuses_imports = false;
  /// Copies between memory of devices take so long. Lazy only.
  std::chrono::milliseconds slow_copies{0};
};

/// What a guarded device has shared, and opened of others' memory.
struct GuardedSharing {
  int exported = 0;         ///< pieces, now
  int imported = 0;         ///< pieces, now
  int imports = 0;          ///< ever
  int freed_too_early = 0;  ///< pieces, while somebody had them imported
};
GuardedSharing sharing_of(const base::DeviceRuntime& guarded);

/// What stops the thread that does it, or would with a GPU.
struct HostWaits {
  std::uint64_t events = 0;  ///< waits for an event, a stream or the device
  std::uint64_t copies = 0;  ///< copies from or to memory of the host that is not pinned
  std::uint64_t memory = 0;  ///< memory of the device, or pinned, that was asked for or given back
  bool operator==(const HostWaits&) const = default;
  HostWaits operator-(const HostWaits& earlier) const {
    return {events - earlier.events, copies - earlier.copies, memory - earlier.memory};
  }
};

/// Of the calling thread, on all guarded devices, since it began.
HostWaits host_waits();

/// What a profiler would have been shown by the calling thread.
struct Ranges {
  std::vector<std::string> begun;  ///< "WHAT UNIT", behind two spaces for each range around it
  int open = 0;                    ///< begun and not ended; below 0: ended too often
};
/// The names are forgotten, the open ones stay open.
Ranges take_ranges();

/// Calls itself cuda:0. Thread-safe: one thread at a time works on it. Buffers come from it, so it outlives them.
std::shared_ptr<base::DeviceRuntime> make_guarded_device(GuardedOptions options = {});

}  // namespace tessera::harness
