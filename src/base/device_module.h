// What a loadable module with a device offers: one C function, tessera_device_entry(). The file is called DEVICE.so and
// lies in tessera-modules/devices beside the library. It is never unloaded.
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

/// Nothing throws through the entry: an exception travels as a value.
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

/// `abi` and `size` are read first, and nothing else where they are not the library's own.
struct tessera_device {
  const char* abi;   ///< TESSERA_ABI
  std::size_t size;  ///< of this struct
  std::string_view name;
  tessera::base::DeviceProbe (*probe)() noexcept;
  tessera::base::OpenedDevice (*open)(int index) noexcept;
};

using tessera_device_entry_function = const tessera_device*();
}
