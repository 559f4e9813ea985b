// What the layers above put into the CUDA device's module. Each defines its own function, where its kernels are: base
// knows the layers' tables as little as they know each other's.
#pragma once

#include <string_view>

namespace tessera::base::cuda {

const void* find_of_nn(std::string_view interface) noexcept;    ///< src/nn/kernels/cuda
const void* find_of_comm(std::string_view interface) noexcept;  ///< src/comm/kernels/cuda

}  // namespace tessera::base::cuda
