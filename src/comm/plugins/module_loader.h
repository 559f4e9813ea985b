// Backends that are loadable modules: where they lie, how one is loaded, and what they say of themselves.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/registry.h"

namespace tessera::comm {

struct ModuleFile {
  std::string backend;  ///< what the file's name says: BACKEND.so or BACKEND-VARIANT.so
  std::string path;
  std::string problem;  ///< where there is no such file or folder: why; the rest is then what was asked for
};

/// What TESSERA_PLUGIN_PATH names, in its order, then the folder beside the library; within a folder by name. Nothing
/// is loaded.
std::vector<ModuleFile> find_modules();

/// Loads it into this process, for good, or finds it loaded. Throws InvalidUsage with the reason why it can't be.
const Backend& load_module(const ModuleFile& file);

/// What a module says of itself, with its file's name for the backend's.
struct ModuleReport {
  ModuleFile file;
  std::string reason;  ///< why it can't be loaded or used; "" where it can
  std::string devices;
  std::vector<std::string> launch_prefix;
  std::vector<ModuleVariable> variables;
};

/// Asks each in a process of its own: a module that crashes or hangs does it there.
std::vector<ModuleReport> ask_modules(std::span<const ModuleFile> files);

/// The other side of ask_modules(): loads the module and describes it as text for read_report().
TESSERA_API std::string describe_module(const std::string& path);
/// False: `text` isn't complete.
bool read_report(const std::string& text, ModuleReport& report);

}  // namespace tessera::comm
