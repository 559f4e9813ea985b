// The environment variables of nn.
#pragma once

#include <array>
#include <span>

#include "tessera/base/env.h"

namespace tessera::nn {

/// See AttentionLibrary.
inline constexpr base::EnvVariable kAttentionVariable{
    "TESSERA_ATTENTION", "auto",
    "16-bit attention on CUDA: auto (cuDNN where it is installed), cudnn (an error without it) or own (this "
    "library's)"};
/// See Products.
inline constexpr base::EnvVariable kProductsVariable{
    "TESSERA_PRODUCTS", "library",
    "matrix products on the host: library (oneDNN or OpenBLAS) or own (the same bits on every processor; the default "
    "of compare, explain and plan)"};
/// Read by the CUDA device; see docs/performance.md.
inline constexpr base::EnvVariable kMatmulVariable{
    "TESSERA_MATMUL", "",
    "algorithms of cuBLASLt: FILE, or try:FILE to try them on one rank and write FILE; default: its first choice"};

/// All of them.
inline std::span<const base::EnvVariable> variables() {
  static constexpr std::array kAll{kAttentionVariable, kProductsVariable, kMatmulVariable};
  return kAll;
}

}  // namespace tessera::nn
