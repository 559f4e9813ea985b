// A small device module that the build compiles in several variants: each has one defect or none.
#include "tessera/base/device_module.h"
#include "tessera/base/error.h"

#ifndef MODULE_ABI
#define MODULE_ABI TESSERA_ABI
#endif
#ifndef MODULE_SIZE
#define MODULE_SIZE sizeof(tessera_device)
#endif

#ifndef NO_ENTRY
extern "C" TESSERA_API const tessera_device* tessera_device_entry() {
  using namespace tessera::base;
  static const tessera_device device = {
      .abi = MODULE_ABI,
      .size = MODULE_SIZE,
      .name = MODULE_NAME,
      .probe = +[]() noexcept -> DeviceProbe { return {.problem = "a bead is missing", .devices = {}}; },
      .open = +[](int) noexcept -> OpenedDevice {
        return {nullptr, std::make_exception_ptr(Unsupported("an abacus has no streams"))};
      }};
  return &device;
}
#endif
