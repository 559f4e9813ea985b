// Finds and opens the project's loadable modules; the devices that need none.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "tessera/base/device_module.h"
#include "tessera/base/device_runtime.h"
#include "tessera/base/export.h"

namespace tessera::base {

/// The directory tessera-modules beside the library, or "" if it can't be determined.
TESSERA_API std::string module_directory();

/// Requirements for a module's table: struct NAME, found by the C function NAME_entry().
struct ModuleDescriptor {
  std::string name;
  std::string kind;  ///< the file's description in errors
  const char* abi;
  std::size_t size;
};

/// Loads a module permanently, unless it is loaded already, and returns its entry. Throws InvalidUsage with the reason
/// if it can't.
TESSERA_API void* module_entry(const std::string& path, const ModuleDescriptor& table);
/// Throws InvalidUsage if a module's table isn't the one that this library was built for. `abi` may be null.
TESSERA_API void check_module(const std::string& path, const ModuleDescriptor& table, const char* abi,
                              const std::size_t* size);

/// A module's table, never null: a pointer, since it belongs to the loaded module and not to the arguments. `abi` and
/// `size` are read first; unless they equal the library's own, nothing else is read.
template <class Table>
const Table* open_module(const std::string& path, const ModuleDescriptor& table) {
  const Table* const found = reinterpret_cast<const Table* (*)()>(module_entry(path, table))();
  check_module(path, table, found == nullptr ? nullptr : found->abi, found == nullptr ? nullptr : &found->size);
  return found;
}

std::shared_ptr<DeviceRuntime> cpu_runtime();
std::shared_ptr<DeviceRuntime> meta_runtime();

/// A device of the project whose module was not built. The build generates the list.
struct DeviceNotBuilt {
  std::string_view name;
  std::string_view reason;
};
std::span<const DeviceNotBuilt> devices_not_built();

/// Loads a device module and returns its table, never null.
TESSERA_API const tessera_device* load_device_module(const std::string& path);

}  // namespace tessera::base
