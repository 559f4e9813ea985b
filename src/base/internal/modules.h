// Where the project's own loadable modules lie, and how one is opened.
#pragma once

#include <string>

#include "tessera/base/device_module.h"
#include "tessera/base/export.h"

namespace tessera::base {

/// The folder tessera-modules beside the library, or "" where that can't be found out.
TESSERA_API std::string module_folder();

/// Loads the module of a device for good, or finds it loaded. Throws InvalidUsage with the reason why it can't be.
TESSERA_API const tessera_device& load_device_module(const std::string& path);

}  // namespace tessera::base
