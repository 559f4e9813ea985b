#include "tessera/fsdp/model.h"

#include <algorithm>
#include <set>

#include "tessera/base/error.h"

namespace tessera::fsdp {

ModelTensor::~ModelTensor() = default;
Module::~Module() = default;
Runtime::~Runtime() = default;
Model::~Model() = default;

void Model::checkpoint_activations() {
  throw Unsupported("this model's library can't recompute activations here; models of tessera::nn and libtorch can");
}

std::vector<Module*> Module::modules() {
  std::vector<Module*> all{this};
  for (const auto& child : children_)
    for (Module* below : child->modules()) all.push_back(below);
  return all;
}

std::vector<std::shared_ptr<Parameter>> Module::parameters() const {
  std::set<const Parameter*> seen;
  std::vector<std::shared_ptr<Parameter>> all;
  const auto add = [&](const std::vector<std::shared_ptr<Parameter>>& some) {
    for (const auto& parameter : some)
      if (seen.insert(parameter.get()).second) all.push_back(parameter);
  };
  add(parameters_);
  for (const auto& child : children_) add(child->parameters());
  return all;
}

std::vector<std::shared_ptr<ModuleBuffer>> Module::buffers() const {
  std::vector<std::shared_ptr<ModuleBuffer>> all = own_buffers_;
  for (const auto& child : children_)
    for (auto& buffer : child->buffers()) all.push_back(std::move(buffer));
  return all;
}

Module& Module::find(std::string_view path) {
  const std::vector<Module*> all = modules();
  const auto at = [&](std::string_view name) {
    const auto found = std::find_if(all.begin(), all.end(), [&](const Module* m) { return m->path() == name; });
    return found == all.end() ? nullptr : *found;
  };
  if (Module* const found = at(path)) return *found;
  // Lists the names at the level of the first part of the path that doesn't exist.
  const Module* parent = nullptr;
  for (std::string_view level = path; parent == nullptr && !level.empty();) {
    level = level.substr(0, level.rfind('.') == std::string_view::npos ? 0 : level.rfind('.'));
    parent = at(level);
  }
  std::string known;
  for (const auto& child : (parent != nullptr ? parent : this)->children_)
    known += (known.empty() ? "" : " ") + child->path();
  throw InvalidUsage("no module '" + std::string(path) + "'; known: " + known);
}

}  // namespace tessera::fsdp
