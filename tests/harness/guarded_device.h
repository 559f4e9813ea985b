// A device for tests: host memory that the host can't touch. Its pages are closed except while work of a stream runs,
// so a host that reads or writes a tensor without host_access.h crashes, as it would (or worse, would not) with a GPU.
#pragma once

#include <functional>
#include <memory>

#include "tessera/base/device_runtime.h"
#include "tessera/nn/device_kernels.h"

namespace tessera::harness {

struct GuardedOptions {
  /// The device's kernels; null: the host's.
  std::unique_ptr<nn::DeviceKernels> (*kernels)(const nn::KernelResources&) = nullptr;
  /// Streams run nothing before somebody asks for an event behind it, as a GPU may be arbitrarily late: a dependency
  /// that was forgotten reads stale data.
  bool lazy = false;
};

/// Calls itself cuda:0. Thread-safe: one thread at a time works on it. Buffers come from it, so it outlives them.
std::shared_ptr<base::DeviceRuntime> make_guarded_device(GuardedOptions options = {});

}  // namespace tessera::harness
