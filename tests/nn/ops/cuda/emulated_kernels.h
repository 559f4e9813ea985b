// The whole table of CUDA kernels over the emulation; only matrix products are the host's.
#pragma once

#include <memory>

#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn::test {

std::unique_ptr<DeviceKernels> make_emulated_kernels(const KernelResources& resources);

/// In which order the threads of a block run from now on: 0 to kThreadOrders - 1, as emulation.h has them.
void set_thread_order(int order);
inline constexpr int kThreadOrders = 4;

}  // namespace tessera::nn::test
