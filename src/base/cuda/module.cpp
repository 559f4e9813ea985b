// The module's entry: base's device, with the tables of the layers above.
#include <cstdlib>

#include "tessera/base/cuda/runtime.h"

namespace {

using namespace tessera::base;  // NOLINT: this file is the whole module's

const void* find(std::string_view interface) noexcept {
  const void* const found = cuda::find_of_nn(interface);
  return found != nullptr ? found : cuda::find_of_comm(interface);
}

DeviceProbe probe() noexcept {
  DeviceProbe found = cuda::probe();
  found.libraries = cuda::libraries_of_nn();
  return found;
}

OpenedDevice open(int index) noexcept {
  try {
    return {cuda::open(index, find), nullptr};
  } catch (...) {
    return {nullptr, std::current_exception()};
  }
}

}  // namespace

extern "C" TESSERA_API const tessera_device* tessera_device_entry() {
  // Code that CUDA loads at a kernel's first launch can wait for all streams, also for one that waits for the host. It
  // reads the variable at its first call.
  static const int unused = ::setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  static_cast<void>(unused);
  static const tessera_device device = {
      .abi = TESSERA_ABI, .size = sizeof(tessera_device), .name = "cuda", .probe = probe, .open = open};
  return &device;
}
