#include "tessera/fsdp/wrap.h"

#include <algorithm>
#include <map>
#include <set>

#include "tessera/base/parse.h"

namespace tessera::fsdp {
namespace {

using Group = std::vector<Module*>;

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

void add_blocks(Module& model, std::vector<Group>& groups) {
  for (Module* module : model.modules())
    if (module->is_block()) groups.push_back({module});
}

/// Bottom-up: a module becomes a unit if its remaining parameters are numerous enough. Returns the count left over.
std::int64_t add_by_size(Module& module, std::int64_t least, bool is_root, std::vector<Group>& groups) {
  std::int64_t left = 0;
  for (const auto& parameter : module.own_parameters()) left += parameter->count();
  for (const auto& child : module.children()) left += add_by_size(*child, least, false, groups);
  if (is_root || left < least) return left;
  groups.push_back({&module});
  return 0;
}

std::vector<Group> groups_of(Module& model, std::string_view spec) {
  std::vector<Group> groups;
  if (spec == "none") return groups;
  if (spec.starts_with("size:")) {
    const auto least = static_cast<std::int64_t>(parse_size(spec.substr(5), "wrap size:N"));
    if (least == 0) throw InvalidUsage("wrap size:N: N must be above 0");
    add_by_size(model, least, true, groups);
    return groups;
  }
  for (const std::string_view part : split(spec, ';')) {
    if (part == "block") {
      add_blocks(model, groups);
      continue;
    }
    if (part.starts_with("type:")) {
      for (Module* module : modules_named(model, part, "wrap")) groups.push_back({module});
      continue;
    }
    Group group;
    for (const std::string_view path : split(part, '+')) {
      if (path.empty()) throw InvalidUsage("wrap '" + std::string(spec) + "': a module's name is missing");
      group.push_back(&model.find(path));
    }
    groups.push_back(std::move(group));
  }
  if (groups.empty())
    throw InvalidUsage("wrap " + std::string(spec) +
                       ": the model has no blocks (modules marked as such); use none, size:N or module names");
  return groups;
}

std::string name_of_group(const Group& group) {
  std::string name;
  for (const Module* module : group) name += (name.empty() ? "" : "+") + module->path();
  return name;
}

/// For each parameter, the modules that own it directly: several if it is tied.
std::map<const Parameter*, std::set<const Module*>> owners_of(Module& model) {
  std::map<const Parameter*, std::set<const Module*>> owners;
  for (const Module* module : model.modules())
    for (const auto& parameter : module->own_parameters()) owners[parameter.get()].insert(module);
  return owners;
}

std::vector<UnitSpec> units_of(Module& model, const std::vector<Group>& groups, const IgnoredParameters& ignored) {
  std::map<const Module*, std::size_t> position;
  for (const Module* module : model.modules()) position.emplace(module, position.size());

  // Inner units first, so that an outer unit contains only what is left; a module may be in one unit only.
  std::vector<std::size_t> by_depth(groups.size());
  for (std::size_t i = 0; i < groups.size(); ++i) by_depth[i] = i;
  std::stable_sort(by_depth.begin(), by_depth.end(),
                   [&](std::size_t a, std::size_t b) { return position.at(groups[a][0]) > position.at(groups[b][0]); });

  const auto owners = owners_of(model);
  std::set<const Parameter*> taken;
  for (const auto& parameter : model.parameters())
    if (ignored && ignored(*parameter)) taken.insert(parameter.get());
  std::set<const Module*> named;
  std::vector<UnitSpec> units;
  for (const std::size_t index : by_depth) {
    UnitSpec unit{.name = name_of_group(groups[index]), .modules = groups[index]};
    std::set<const Module*> inside;
    for (Module* module : unit.modules) {
      if (!named.insert(module).second) throw InvalidUsage("wrap: " + module->path() + " is named in two units");
      for (const Module* below : module->modules()) inside.insert(below);
    }
    for (Module* module : unit.modules) {
      for (const auto& parameter : module->parameters()) {
        const auto& uses = owners.at(parameter.get());
        const bool all_inside =
            std::all_of(uses.begin(), uses.end(), [&](const Module* m) { return inside.contains(m); });
        if (all_inside && taken.insert(parameter.get()).second) unit.parameters.push_back(parameter);
      }
    }
    if (!unit.parameters.empty()) units.push_back(std::move(unit));
  }
  std::stable_sort(units.begin(), units.end(), [&](const UnitSpec& a, const UnitSpec& b) {
    return position.at(a.modules[0]) < position.at(b.modules[0]);
  });

  UnitSpec root{.name = "root", .modules = {&model}, .is_root = true};
  for (const auto& parameter : model.parameters())
    if (!taken.contains(parameter.get())) root.parameters.push_back(parameter);
  if (!root.parameters.empty()) units.insert(units.begin(), std::move(root));
  if (units.empty()) throw InvalidUsage("the model has no parameters, or all are ignored");
  return units;
}

}  // namespace

std::vector<UnitSpec> make_units(Module& model, std::string_view spec, const IgnoredParameters& ignored) {
  return units_of(model, groups_of(model, spec), ignored);
}

std::vector<UnitSpec> make_units(Module& model, const WrapPolicy& chosen, const IgnoredParameters& ignored) {
  std::vector<Group> groups;
  for (Module* module : model.modules())
    if (module != &model && chosen(*module)) groups.push_back({module});
  return units_of(model, groups, ignored);
}

std::vector<Module*> modules_named(Module& model, std::string_view item, std::string_view option) {
  constexpr std::string_view kType = "type:";
  if (!item.starts_with(kType)) {
    if (item.empty()) throw InvalidUsage(std::string(option) + ": a module's name is missing");
    return {&model.find(item)};
  }
  std::vector<Module*> found;
  std::set<std::string> known;
  for (Module* module : model.modules()) {
    if (module == &model) continue;
    known.insert(module->type());
    if (module->type() == item.substr(kType.size())) found.push_back(module);
  }
  if (!found.empty()) return found;
  std::string list;
  for (const std::string& name : known) list += " " + name;
  throw InvalidUsage(std::string(option) + " " + std::string(item) + ": the model has no module of that class; it has" +
                     list);
}

std::vector<RootOverhead> needlessly_held(Module& model, const UnitSpec& unit) {
  const auto owners = owners_of(model);
  std::vector<RootOverhead> held;
  for (const auto& parameter : unit.parameters) {
    const auto& uses = owners.at(parameter.get());
    const Module* const only = *uses.begin();
    if (uses.size() > 1 || only == unit.modules.front()) continue;
    if (held.empty() || held.back().module != only) held.push_back({only, 0});
    held.back().elements += parameter->count();
  }
  return held;
}

}  // namespace tessera::fsdp
