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
};

/// Calls itself cuda:0. Used by one thread (and a pool's, inside the work).
std::shared_ptr<base::DeviceRuntime> make_guarded_device(GuardedOptions options = {});

}  // namespace tessera::harness
