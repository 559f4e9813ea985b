// The product of one tile, for kernels of the host that divide their own work.
#pragma once

#include "tessera/nn/kernels/gemm.h"

namespace tessera::nn::kernels {

/// gemm() on the calling thread, without tiles. The strides must be given.
void gemm_tile(const GemmArgs<float>& args, Products products);

}  // namespace tessera::nn::kernels
