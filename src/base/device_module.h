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
  std::shared_ptr<DeviceRuntime> runtime;  ///< null if `error` is set
  std::exception_ptr error;                ///< the exception that open() caught; null on success
};

/// The result of probe(), which finds devices without opening them.
struct DeviceProbe {
  std::string problem;                    ///< why no device can be used, or ""
  std::vector<DeviceProperties> devices;  ///< the devices that open() accepts, by index
  std::string libraries;                  ///< one line: which vendors' libraries compute what; "": nothing to say
};

}  // namespace tessera::base

extern "C" {

/// The library reads `abi` and `size` first; unless they equal its own, it reads nothing else.
struct tessera_device {
  const char* abi;                                          ///< TESSERA_ABI
  std::size_t size;                                         ///< size of this struct
  std::string_view name;                                    ///< name of the device type: "cuda"
  tessera::base::DeviceProbe (*probe)() noexcept;           ///< looks for devices
  tessera::base::OpenedDevice (*open)(int index) noexcept;  ///< opens the device of this index
};

/// The type of tessera_device_entry(). The struct that it returns is never freed.
using tessera_device_entry_function = const tessera_device*();
}
