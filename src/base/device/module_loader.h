// Where the project's own loadable modules lie, and how one is opened.
#pragma once

#include <cstddef>
#include <string>

#include "tessera/base/device_module.h"
#include "tessera/base/export.h"

namespace tessera::base {

/// The folder tessera-modules beside the library, or "" where that can't be found out.
TESSERA_API std::string module_folder();

/// What a module's table must be: struct NAME, found by the C function NAME_entry().
struct ModuleDescriptor {
  std::string name;
  std::string kind;  ///< what a file that has it is called, in errors
  const char* abi;
  std::size_t size;
};

/// Loads a module for good, or finds it loaded, and gives its entry. Throws InvalidUsage with the reason why not.
void* module_entry(const std::string& path, const ModuleDescriptor& table);
/// Throws InvalidUsage where a module's table isn't what this library was built for. `abi` may be null.
void check_module(const std::string& path, const ModuleDescriptor& table, const char* abi, const std::size_t* size);

/// A module's table, of which `abi` and `size` are read first, and nothing else where they are not the library's own.
template <class Table>
const Table& open_module(const std::string& path, const ModuleDescriptor& table) {
  const Table* const found = reinterpret_cast<const Table* (*)()>(module_entry(path, table))();
  check_module(path, table, found == nullptr ? nullptr : found->abi, found == nullptr ? nullptr : &found->size);
  return *found;
}

/// The table of a device's module.
TESSERA_API const tessera_device& load_device_module(const std::string& path);

}  // namespace tessera::base
