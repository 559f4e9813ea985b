#include "tessera/comm/registry.h"

#include <algorithm>
#include <map>

#include "tessera/base/error.h"
#include "tessera/comm/plugins/module_loader.h"

namespace tessera::comm {
namespace {

const Backend* find_builtin(std::string_view name) {
  const auto all = builtin_backends();
  const auto found = std::ranges::find_if(all, [&](const Backend* b) { return b->name == name; });
  return found == all.end() ? nullptr : *found;
}

std::string all_states() {
  std::string text;
  for (const BackendState& state : list_backends())
    text += (text.empty() ? "" : ", ") + state.name + (state.available ? " (available)" : " (" + state.reason + ")");
  return text;
}

/// If there are several modules, they are probed first, so that only one vendor's library is loaded into this process.
/// A conflict with libraries that the program itself has loaded is detected only in this process; then the next module
/// may work.
const Backend& load_usable(const std::vector<ModuleFile>& variants) {
  if (variants.size() == 1) return *load_module(variants.front());
  const Backend* last = nullptr;
  const std::vector<BackendState> states = probe_modules(variants);
  for (std::size_t i = 0; i < states.size(); ++i) {
    if (!states[i].available) continue;
    last = load_module(variants[i]);
    if (last->probe().empty()) break;
  }
  if (last == nullptr) throw InvalidUsage("none of its modules can be used");
  return *last;
}

}  // namespace

std::vector<BackendState> list_backends() {
  std::vector<BackendState> states;
  for (const Backend* backend : builtin_backends()) {
    std::string reason = backend->probe();
    states.push_back(
        {std::string(backend->name), reason.empty(), std::move(reason), std::string(backend->devices), {}, {}});
  }
  const std::vector<ModuleFile> files = find_modules();
  std::vector<BackendState> variants = probe_modules(files);
  std::map<std::string, BackendState, std::less<>> modules;
  for (std::size_t i = 0; i < files.size(); ++i) {
    BackendState& state = variants[i];
    if (find_builtin(state.name) != nullptr) {
      states.push_back({.name = files[i].path, .reason = "the library has a built-in backend '" + state.name + "'"});
      continue;
    }
    // Several modules may implement one backend (for libraries of several vendors, say): the first usable one is used.
    const auto [known, is_first] = modules.try_emplace(state.name, state);
    if (is_first || known->second.available) continue;
    if (state.available)
      known->second = std::move(state);
    else
      known->second.reason += "; " + state.reason;
  }
  for (auto& [name, state] : modules) states.push_back(std::move(state));
  for (const BackendNotBuilt& missing : backends_not_built())
    if (!modules.contains(missing.name))
      states.push_back({.name = std::string(missing.name), .reason = "not built: " + std::string(missing.reason)});
  std::ranges::sort(states, [](const BackendState& a, const BackendState& b) { return a.name < b.name; });
  return states;
}

const Backend& find_backend(std::string_view name) {
  std::string problem = "unknown backend '" + std::string(name) + "'";
  const std::string unusable = "backend '" + std::string(name) + "' is not available";
  std::vector<ModuleFile> variants = find_modules();
  std::erase_if(variants, [&](const ModuleFile& file) { return file.backend != name; });
  const auto left_out = backends_not_built();
  if (std::ranges::any_of(left_out, [&](const BackendNotBuilt& b) { return b.name == name; })) problem = unusable;
  try {
    const Backend* backend = find_builtin(name);
    if (backend == nullptr && !variants.empty()) backend = &load_usable(variants);
    if (backend != nullptr) {
      const std::string reason = backend->probe();
      if (reason.empty()) return *backend;
      problem = unusable + ": " + reason;
    }
  } catch (const InvalidUsage& error) {
    problem = unusable + ": " + error.what();
  }
  throw InvalidUsage(problem + "; known: " + all_states());
}

}  // namespace tessera::comm
