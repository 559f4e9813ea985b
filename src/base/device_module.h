// The interface of a loadable module with a device: one C function, tessera_device_entry(). The file is named DEVICE.so
// and lies in tessera-modules/devices beside the library. It is never unloaded.
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/abi.h"
#include "tessera/base/device_runtime.h"

namespace tessera::base {

/// The result of open(). Nothing throws through the entry: an exception is returned as a value.
struct OpenedDevice {
  std::shared_ptr<DeviceRuntime> runtime;
  std::exception_ptr error;
};

struct DeviceProbe {
  std::string problem;  ///< why no device can be used, or ""
  std::vector<DeviceProperties> devices;
};

}  // namespace tessera::base

extern "C" {

/// The library reads `abi` and `size` first; unless they equal its own, it reads nothing else.
struct tessera_device {
  const char* abi;   ///< TESSERA_ABI
  std::size_t size;  ///< of this struct
  std::string_view name;
  tessera::base::DeviceProbe (*probe)() noexcept;
  tessera::base::OpenedDevice (*open)(int index) noexcept;
};

using tessera_device_entry_function = const tessera_device*();
}
