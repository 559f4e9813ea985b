// The entry of the module: base's device and nn's kernels on it, together.
#include "tessera/base/cuda/internal/runtime.h"
#include "tessera/nn/ops/cuda/products.cuh"

namespace {

using namespace tessera;  // NOLINT: this file is the whole module's

const nn::KernelsEntry kKernels{[](const nn::KernelResources& resources) {
  return nn::cuda::make_cuda_kernels(resources.memory, nn::cuda::make_products(resources));
}};

const void* find(std::string_view interface) noexcept {
  return interface == nn::KernelsEntry::kInterface ? &kKernels : nullptr;
}

base::OpenedDevice open(int index) noexcept {
  try {
    return {base::cuda::open(index, find), nullptr};
  } catch (...) {
    return {nullptr, std::current_exception()};
  }
}

}  // namespace

extern "C" TESSERA_API const tessera_device* tessera_device_entry() {
  static const tessera_device device = {
      .abi = TESSERA_ABI, .size = sizeof(tessera_device), .name = "cuda", .probe = base::cuda::probe, .open = open};
  return &device;
}
