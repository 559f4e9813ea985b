// The built-in devices, which need no module.
#pragma once

#include <memory>

#include "tessera/base/device_runtime.h"

namespace tessera::base {

std::shared_ptr<DeviceRuntime> cpu_runtime();
std::shared_ptr<DeviceRuntime> meta_runtime();

}  // namespace tessera::base
