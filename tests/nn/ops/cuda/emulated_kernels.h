// The whole table of CUDA kernels over the emulation; only matrix products are the host's.
#pragma once

#include <memory>

#include "tessera/nn/device_kernels.h"

namespace tessera::nn::test {

std::unique_ptr<DeviceKernels> make_emulated_kernels(const KernelResources& resources);

/// In which order the threads of a block run from now on (emulation.h): 0, 1 or 2.
void set_thread_order(int order);

}  // namespace tessera::nn::test
