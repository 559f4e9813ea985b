// The built-in devices, which need no module.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "tessera/base/device_runtime.h"

namespace tessera::base {

std::shared_ptr<DeviceRuntime> cpu_runtime();
std::shared_ptr<DeviceRuntime> meta_runtime();

/// A device of the project whose module was not built. The build generates the list.
struct DeviceNotBuilt {
  std::string_view name;
  std::string_view reason;
};
std::span<const DeviceNotBuilt> devices_not_built();

}  // namespace tessera::base
