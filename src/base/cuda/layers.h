// Tables of the layers above in the CUDA device's module. Each layer defines its own function beside its kernels: base
// doesn't know the layers' tables, nor do they know each other's.
#pragma once

#include <string>
#include <string_view>

namespace tessera::base::cuda {

const void* find_of_nn(std::string_view interface) noexcept;    ///< src/nn/kernels/cuda
std::string libraries_of_nn() noexcept;                         ///< what DeviceProbe::libraries says of them
const void* find_of_comm(std::string_view interface) noexcept;  ///< src/comm/kernels/cuda

}  // namespace tessera::base::cuda
