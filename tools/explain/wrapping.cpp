#include "tools/explain/explanation.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "tools/cli/output.h"
#include "tools/train/model_task.h"

namespace tessera::tools {
namespace {

using fsdp::ElementRange;
using ParameterSet = std::set<const fsdp::Parameter*>;

bool uses_any(const fsdp::Module& module, const ParameterSet& parameters) {
  const auto all = module.parameters();
  return std::ranges::any_of(all, [&](const auto& each) { return parameters.count(each.get()) > 0; });
}

/// The path below `unit`: "h.0.mlp" is "mlp" in "h.0".
std::string path_in(const std::string& path, const std::string& unit) {
  return path.starts_with(unit + ".") ? path.substr(unit.size() + 1) : path;
}

/// A module's path, and whose parameter it uses if it has none of its own.
std::string with_tie(const fsdp::Module& module, const std::string& unit) {
  std::string path = path_in(module.path(), unit);
  if (module.own_parameters().empty()) return path;
  const std::string& owner = module.own_parameters().front()->name();
  if (owner.starts_with(module.path() + ".")) return path;
  return path + " (= " + owner.substr(0, owner.rfind('.')) + ")";
}

/// Whether another unit is this module, or inside it.
bool holds_unit(const fsdp::Module& module, const std::vector<fsdp::UnitSpec>& specs, const fsdp::UnitSpec& except) {
  for (const fsdp::UnitSpec& spec : specs)
    for (const fsdp::Module* each : spec.modules)
      if (&spec != &except && (each == &module || each->path().starts_with(module.path() + "."))) return true;
  return false;
}

void describe(WrappedUnit& unit, const fsdp::UnitSpec& spec, const std::vector<fsdp::UnitSpec>& specs) {
  ParameterSet own;
  for (const auto& parameter : spec.parameters) own.insert(parameter.get());
  if (spec.modules.size() != 1) {
    unit.contents = joined_by(each_of(spec.modules, [](const fsdp::Module* part) { return with_tie(*part, ""); }), " ");
    return;
  }
  const fsdp::Module& module = *spec.modules.front();
  std::vector<std::string> names;
  bool inside = false;
  for (const auto& child : module.children()) {
    const bool used = uses_any(*child, own);
    if (holds_unit(*child, specs, spec)) {
      inside = true;
      unit.last.clear();
    } else if (used) {
      (inside ? unit.last : unit.first).push_back(path_in(child->path(), module.path()));
    }
    if (used) names.push_back(with_tie(*child, module.path()));
  }
  const std::string type = spec.is_root ? "" : module.type();
  unit.contents = joined_by(names, " ");
  if (!type.empty()) unit.contents = names.empty() ? type : type + ": " + unit.contents;
}

/// Names of parameters in a range: a module whose parameters are all in it by its path.
std::vector<std::string> contents_of(const WrappedUnit& unit, const fsdp::FlatLayout& flat, ElementRange range) {
  const auto module_of = [](const fsdp::FlatEntry& entry) {
    return entry.parameter->name().substr(0, entry.parameter->name().rfind('.'));
  };
  const auto is_whole = [&](const fsdp::FlatEntry& entry) {
    return within(entry, range).count() == entry.parameter->count();
  };
  std::vector<std::string> names;
  for (const fsdp::FlatEntry& entry : flat.entries) {
    const std::int64_t inside = within(entry, range).count();
    if (inside == 0) continue;
    const std::string name = path_in(entry.parameter->name(), unit.name);
    const std::string module = module_of(entry);
    const bool whole_module = std::ranges::all_of(
        flat.entries, [&](const fsdp::FlatEntry& other) { return module_of(other) != module || is_whole(other); });
    if (whole_module) {
      if (names.empty() || names.back() != path_in(module, unit.name)) names.push_back(path_in(module, unit.name));
    } else if (is_whole(entry)) {
      names.push_back(name);
    } else {
      names.push_back(fmt::format("{} of {} of {}", with_commas(inside), with_commas(entry.parameter->count()), name));
    }
  }
  return names;
}

}  // namespace

const fsdp::FlatLayout& WrappedUnit::largest() const {
  return *std::ranges::max_element(flats, {}, &fsdp::FlatLayout::padded);
}

fsdp::ElementRange shard_of(int rank, std::int64_t padded, const fsdp::Axes& axes, const fsdp::MeshShape& mesh) {
  ElementRange range{0, padded};
  for (auto axis = mesh.axes.rbegin(); axis != mesh.axes.rend(); rank /= axis->size, ++axis) {
    if (axes.count(axis->name) == 0) continue;
    const std::int64_t part = range.count() / axis->size;
    range = {range.begin + part * (rank % axis->size), range.begin + part * (rank % axis->size + 1)};
  }
  return range;
}

std::vector<Shard> shards_of(const WrappedUnit& unit, const fsdp::Axes& axes, const fsdp::MeshShape& mesh) {
  const fsdp::FlatLayout& flat = unit.largest();
  std::vector<Shard> shards;
  for (int rank = 0; rank < mesh.size(); ++rank) {
    const ElementRange range = shard_of(rank, flat.padded, axes, mesh);
    auto same = std::ranges::find_if(
        shards, [&](const Shard& shard) { return shard.range.begin == range.begin && shard.range.end == range.end; });
    if (same == shards.end()) same = shards.insert(same, {{}, range, contents_of(unit, flat, range)});
    same->ranks.push_back(rank);
  }
  std::ranges::sort(shards, {}, [](const Shard& shard) { return shard.range.begin; });
  return shards;
}

Wrapping::Wrapping(const TrainPlan& plan, const StepPlan& step) : task_(make_task(plan, context_)) {
  fsdp::Module& root = task_->model().root();
  const std::vector<fsdp::UnitSpec> specs = fsdp::make_units(root, plan.options.wrap);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    WrappedUnit unit{.name = specs[i].name, .is_root = specs[i].is_root};
    unit.kept_after_forward = step.result.units.at(i).kept_after_forward;
    unit.strategy = step.result.units[i].strategy;
    unit.flats = fsdp::make_layouts(specs[i].parameters, plan.ranks);
    for (const fsdp::FlatLayout& flat : unit.flats) {
      unit.elements += flat.elements;
      unit.padded += flat.padded;
      unit.bytes += flat.bytes();
      encoded_ = encoded_ || flat.dtype == base::DType::u8;
    }
    padded_ += unit.padded;
    bytes_ += unit.bytes;
    describe(unit, specs[i], specs);
    if (unit.is_root)
      for (const fsdp::RootOverhead& held : fsdp::needlessly_held(root, specs[i]))
        needlessly_held_.push_back(held.module->path());
    units_.push_back(std::move(unit));
  }
}

}  // namespace tessera::tools
