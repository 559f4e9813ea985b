// Backends: those that are part of the library, and those in loadable modules, which are found, loaded and described
// here.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/registry.h"

namespace tessera::comm {

/// The backends that are part of the library. The build generates the list from the directories of backends/
/// (add_backend).
std::span<const Backend* const> builtin_backends();

/// A module of the project that was not built.
struct BackendNotBuilt {
  std::string_view name;
  std::string_view reason;
};
std::span<const BackendNotBuilt> backends_not_built();

struct ModuleFile {
  std::string backend;  ///< from the file's name: BACKEND.so or BACKEND-VARIANT.so
  std::string path;
  std::string problem;  ///< why there is no such file or directory; the other fields then hold what was requested
};

/// Returns the modules of TESSERA_PLUGIN_PATH in its order, then those of the directory beside the library; sorted by
/// name within a directory. Loads nothing.
TESSERA_API std::vector<ModuleFile> find_modules();

/// Loads the module into this process permanently, unless it is loaded already. Returns its backend, never null, which
/// lives as long as the process. Throws InvalidUsage with the reason if it can't be loaded.
const Backend* load_module(const ModuleFile& file);

/// Each module's description of itself, in the order of `files`, which name the backends. Each is probed in a process
/// of its own, which contains crashes and hangs.
std::vector<BackendState> probe_modules(std::span<const ModuleFile> files);

/// The child's side of probe_modules(): loads the module and describes it as text for read_report().
TESSERA_API std::string describe_module(const std::string& path);
/// False: `text` is incomplete.
bool read_report(const std::string& text, BackendState& report);

}  // namespace tessera::comm
