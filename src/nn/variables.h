// The environment variables of nn.
#pragma once

#include <array>
#include <span>

#include "tessera/base/env.h"

namespace tessera::nn {

/// Read by the CUDA device; see docs/performance.md.
inline constexpr base::EnvVariable kMatmulVariable{
    "TESSERA_MATMUL", "",
    "algorithms of cuBLASLt: FILE, or try:FILE to try them on one rank and write FILE; default: its first choice"};

/// All of them.
inline std::span<const base::EnvVariable> variables() {
  static constexpr std::array kAll{kMatmulVariable};
  return kAll;
}

}  // namespace tessera::nn
