// The kernels of the meta device.
#pragma once

#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn {

std::unique_ptr<DeviceKernels> make_meta_kernels(const KernelResources& resources);

}  // namespace tessera::nn
