// All CUDA kernels over the emulation; only matrix products are the host's.
#pragma once

#include <memory>

#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn::test {

std::unique_ptr<DeviceKernels> make_emulated_kernels(const KernelResources& resources);

/// Sets the order of the threads of a block from now on: 0 to kThreadOrders - 1, as in emulation.h.
void set_thread_order(int order);
/// Kernels that this thread launched so far; products and copies are not among them.
std::size_t kernel_launches();
inline constexpr int kThreadOrders = 4;

}  // namespace tessera::nn::test
