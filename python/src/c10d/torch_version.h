// What differs between the versions of PyTorch for which the package can be built: 2.6 and newer.
#pragma once

#include <torch/version.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

/// 206 for PyTorch 2.6.
#define TESSERA_TORCH (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)

/// Members that PyTorch 2.6 does not call; there they override nothing.
#if TESSERA_TORCH >= 207
#define TESSERA_OVERRIDE_SINCE_2_7 override
#else
#define TESSERA_OVERRIDE_SINCE_2_7
#endif

namespace tessera::c10d_backend {

/// The factor of a PREMUL_SUM.
#if TESSERA_TORCH >= 213
using PreMulSum = ::c10d::PreMulSumSupplement;
#else
using PreMulSum = ::c10d::NCCLPreMulSumSupplement;
#endif

}  // namespace tessera::c10d_backend
