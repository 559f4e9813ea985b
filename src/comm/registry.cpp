#include "tessera/comm/registry.h"

#include <algorithm>

#include "tessera/comm/builtin.h"

namespace tessera::comm {

std::vector<BackendState> list_backends() {
  std::vector<BackendState> states;
  for (const Backend* backend : builtin_backends()) {
    std::string reason = backend->probe();
    states.push_back({std::string(backend->name), reason.empty(), std::move(reason), std::string(backend->devices)});
  }
  std::sort(states.begin(), states.end(), [](const BackendState& a, const BackendState& b) { return a.name < b.name; });
  return states;
}

const Backend& find_backend(std::string_view name) {
  std::string problem = "unknown backend '" + std::string(name) + "'";
  for (const Backend* backend : builtin_backends()) {
    if (backend->name != name) continue;
    if (backend->probe().empty()) return *backend;
    problem = "backend '" + std::string(name) + "' can't be used here";
    break;
  }
  std::string states;
  for (const BackendState& state : list_backends()) {
    if (!states.empty()) states += ", ";
    states += state.name + (state.available ? " (available)" : " (" + state.reason + ")");
  }
  throw InvalidUsage(problem + "; there are: " + states);
}

}  // namespace tessera::comm
