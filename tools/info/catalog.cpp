#include "tools/info/catalog.h"

#include <algorithm>

#include "tessera/comm/init.h"
#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/strategy.h"
#include "tessera/nn/models/config.h"
#include "tessera/nn/variables.h"
#include "tools/launch/ranks.h"

namespace tessera::tools {
namespace {

template <class T, class Range>
void append(std::vector<T>& to, const Range& from) {
  to.insert(to.end(), std::begin(from), std::end(from));
}

ModelEntry model_entry(const std::string& name) {
  const nn::ModelConfig config = nn::preset(name);
  const std::string shape = std::to_string(config.layers) + " layers, width " + std::to_string(config.width) + ", " +
                            std::to_string(config.heads) + " heads, vocabulary " + std::to_string(config.vocabulary) +
                            ", context " + std::to_string(config.context);
  return {name, shape, static_cast<std::uint64_t>(nn::parameter_count(config))};
}

}  // namespace

std::vector<base::EnvVariable> all_variables() {
  std::vector<base::EnvVariable> all;
  append(all, comm::variables());  // one line for each owner of variables
  append(all, nn::variables());
  append(all, tool_variables());
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return all;
}

Catalog catalog() {
  Catalog all;
  for (const base::EnvVariable& own : all_variables())
    all.variables.push_back({std::string(own.name), std::string(own.default_value), std::string(own.help)});
  for (const comm::BackendState& state : comm::list_backends()) {
    all.backends.push_back({state.name, state.available, state.reason, {}});
    if (!state.devices.empty()) all.backends.back().devices.push_back(state.devices);
    append(all.variables, state.variables);
  }
  std::sort(all.variables.begin(), all.variables.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  all.devices = base::list_devices();
  all.strategies = fsdp::strategy_names();
  all.collectives = fsdp::CollectiveRegistry::built_in().names();
  for (const std::string& name : nn::preset_names()) all.models.push_back(model_entry(name));
  return all;
}

}  // namespace tessera::tools
