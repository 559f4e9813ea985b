// What modules of tessera::nn and of other libraries have alike: their hooks, and the walk of their tree.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::base {

/// The pass in which a hook is called.
enum class Phase : std::uint8_t {
  forward,    ///< the first computation of the activations
  recompute,  ///< their recomputation in backward
  backward    ///< the computation of gradients
};

/// Called at a module's boundaries; each may be empty. `post_backward` runs when all gradients that the module's
/// operations in that call produce are written.
struct ModuleHooks {
  std::function<void(Phase)> pre_forward;   ///< before a forward or its recomputation; the argument says which
  std::function<void(Phase)> post_forward;  ///< after a forward or its recomputation
  std::function<void()> pre_backward;       ///< before the backward of a call
  std::function<void()> post_backward;      ///< after the backward of a call
};

/// A module and all below it, depth first.
template <class M>
std::vector<M*> modules_of(M& root) {
  std::vector<M*> all{&root};
  for (const auto& child : root.children())
    for (M* below : modules_of<M>(*child)) all.push_back(below);
  return all;
}

/// own_parameters() of these modules, in their order; shared ones once.
template <class M>
auto parameters_of(const std::vector<const M*>& modules) {
  std::set<const void*> seen;
  std::remove_cvref_t<decltype(modules.front()->own_parameters())> all;
  for (const M* module : modules)
    for (const auto& parameter : module->own_parameters())
      if (seen.insert(parameter.get()).second) all.push_back(parameter);
  return all;
}

/// The module at `path`. Throws InvalidUsage that lists the existing names at the level where the path ends.
template <class M>
M& module_at(M& root, std::string_view path) {
  const std::vector<M*> all = modules_of(root);
  const auto at = [&](std::string_view name) {
    const auto found = std::ranges::find_if(all, [&](const M* module) { return module->path() == name; });
    return found == all.end() ? nullptr : *found;
  };
  if (M* const found = at(path)) return *found;
  const M* parent = nullptr;
  for (std::string_view level = path; parent == nullptr && !level.empty();) {
    level = level.substr(0, level.rfind('.') == std::string_view::npos ? 0 : level.rfind('.'));
    parent = at(level);
  }
  std::string known;
  for (const auto& child : (parent != nullptr ? parent : &root)->children())
    known += (known.empty() ? "" : " ") + child->path();
  throw InvalidUsage("no module '" + std::string(path) + "'; known: " + known);
}

}  // namespace tessera::base
