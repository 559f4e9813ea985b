#include <algorithm>
#include <exception>
#include <filesystem>
#include <map>
#include <mutex>

#include "tessera/base/device/module_loader.h"
#include "tessera/base/error.h"
#include "tessera/comm/core/env_variables.h"
#include "tessera/comm/plugin.h"
#include "tessera/comm/plugins/module_loader.h"

namespace tessera::comm {
namespace {

namespace fs = std::filesystem;

ModuleFile module_file(const fs::path& path) {
  const std::string stem = path.stem().string();
  return {stem.substr(0, stem.find('-')), path.string(), ""};
}

/// Finds all modules of a directory, or the one at `place`.
void look_in(const fs::path& place, bool required, std::vector<ModuleFile>& found) {
  std::error_code error;
  if (!fs::is_directory(place, error)) {
    if (place.extension() == ".so" && fs::exists(place, error)) {
      found.push_back(module_file(place));
    } else if (required) {
      const bool exists = fs::exists(place, error);
      found.push_back({place.string(), place.string(),
                       std::string(exists ? "neither a directory nor a .so file" : "no such file or directory") +
                           " (TESSERA_PLUGIN_PATH)"});
    }
    return;
  }
  std::vector<fs::path> files;
  for (fs::directory_iterator entry(place, error), end; !error && entry != end; entry.increment(error))
    if (entry->path().extension() == ".so") files.push_back(entry->path());
  if (error) found.push_back({place.string(), place.string(), error.message()});
  std::ranges::sort(files);
  for (const fs::path& file : files) found.push_back(module_file(file));
}

Backend backend_of(const tessera_plugin& plugin) {
  return {.name = plugin.name,
          .devices = plugin.devices,
          .probe = plugin.probe,
          .create =
              [create = plugin.create](std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options) {
                PluginCommunicator made = create(std::move(bootstrap), options);
                if (made.error != nullptr) std::rethrow_exception(made.error);
                return std::move(made.communicator);
              },
          .variables = plugin.variables,
          .deterministic = plugin.deterministic,
          .launch_prefix = plugin.launch_prefix};
}

}  // namespace

std::vector<ModuleFile> find_modules() {
  std::vector<ModuleFile> found;
  const std::string path = env_or_default(env::kPluginPath);
  for (std::size_t begin = 0; begin < path.size();) {
    const std::size_t end = std::min(path.find(':', begin), path.size());
    if (end > begin) look_in(path.substr(begin, end - begin), true, found);
    begin = end + 1;
  }
  look_in(base::module_directory(), false, found);
  return found;
}

const Backend* load_module(const ModuleFile& file) {
  // Loaded modules belong to the process, as for dlopen() itself.
  static std::mutex mutex;
  static std::map<std::string, Backend> loaded;
  if (!file.problem.empty()) throw InvalidUsage(file.problem);
  const std::lock_guard lock(mutex);
  const auto known = loaded.find(file.path);
  if (known != loaded.end()) return &known->second;
  const auto* const plugin = base::open_module<tessera_plugin>(
      file.path, {"tessera_plugin", "backend module", TESSERA_PLUGIN_ABI, sizeof(tessera_plugin)});
  if (plugin->name != file.backend)
    throw InvalidUsage(file.path + ": its backend is called '" + std::string(plugin->name) + "'; rename the file to " +
                       std::string(plugin->name) + ".so");
  return &loaded.emplace(file.path, backend_of(*plugin)).first->second;
}

}  // namespace tessera::comm
