// Parser of strategies with their collective plug-ins; and a check that the two fit.
#include <algorithm>
#include <array>
#include <set>

#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/mesh.h"
#include "tessera/fsdp/plugin.h"
#include "tessera/fsdp/precision.h"
#include "tessera/fsdp/strategy.h"

namespace tessera::fsdp {

using comm::OpKind;

namespace {

struct CollectiveChoice {
  OpKind collective;
  std::string Strategy::*name;
};
constexpr std::array<CollectiveChoice, 3> kChoices = {{{OpKind::all_gather, &Strategy::all_gather},
                                                       {OpKind::reduce_scatter, &Strategy::reduce_scatter},
                                                       {OpKind::all_reduce, &Strategy::all_reduce}}};

/// End of the first part of `text`: at a +, except in the directories of a plug-in file's path.
std::size_t end_of_part(std::string_view text) {
  const std::size_t plus = text.find('+');
  if (plus == std::string_view::npos || text.find('/') > plus) return plus;
  return text.find('+', std::min(text.find(".so:"), text.size()));
}

/// "PLUGIN" or "COLLECTIVE=PLUGIN".
void choose(Strategy& strategy, std::string_view part, const CollectiveRegistry& registry) {
  const std::size_t equals = part.find('=');
  const bool all = equals == std::string_view::npos || part.find('/') < equals;
  const std::string plugin(all ? part : part.substr(equals + 1));
  bool found = false;
  for (const CollectiveChoice& choice : kChoices) {
    if (all ? !registry.has(choice.collective, plugin) : comm::name_of(choice.collective) != part.substr(0, equals))
      continue;
    registry.cost(choice.collective, plugin, {.ranks = 1});  // throws if it is not known
    strategy.*choice.name = plugin;
    found = true;
  }
  if (found) return;
  // throws, with what the file exports
  if (all && is_plugin_name(plugin)) plugin_collective(OpKind::all_gather, plugin);
  std::set<std::string> names;
  for (const std::string& name : registry.names()) names.insert(name.substr(name.find(':') + 1));
  std::string known;
  for (const std::string& name : names) known += " " + name;
  throw InvalidUsage(
      "collectives '" + std::string(part) +
      "': write PLUGIN or COLLECTIVE=PLUGIN with all_gather, reduce_scatter or all_reduce; known plug-ins:" + known);
}

bool shards(const Axes& axes, const MeshShape& mesh) {
  return std::any_of(mesh.axes.begin(), mesh.axes.end(),
                     [&](const MeshAxis& axis) { return axis.size > 1 && axes.contains(axis.name); });
}

/// The use of one collective under a strategy: whether it is used, the dtype, and whether it handles shards or
/// overwrites updated parameters.
struct CollectiveUse {
  bool used = false;
  DType dtype = DType::f32;
  bool shards = false;
  bool overwrites = false;
};

CollectiveUse use_of(OpKind collective, const Strategy& strategy, const MeshShape& mesh, Precision precision) {
  Axes replicated, after_step;
  for (const MeshAxis& axis : mesh.axes) {
    if (!strategy.optimizer.contains(axis.name)) replicated.insert(axis.name);
    if (strategy.optimizer.contains(axis.name) && !strategy.param_at_rest.contains(axis.name))
      after_step.insert(axis.name);
  }
  const bool sharded = shards(strategy.optimizer, mesh);
  if (collective == OpKind::all_gather)
    return {sharded, precision.compute, false, shards(after_step, mesh) && !precision.has_master_weights()};
  if (collective == OpKind::reduce_scatter) return {sharded, precision.reduce, false, false};
  return {shards(replicated, mesh), periodic_axis(strategy).empty() ? precision.reduce : DType::f32, sharded, false};
}

}  // namespace

Strategy parse_strategy(std::string_view text, const CollectiveRegistry& collectives) {
  std::size_t end = end_of_part(text);
  Strategy strategy = strategy_named(text.substr(0, end));
  while (end != std::string_view::npos) {
    text.remove_prefix(end + 1);
    end = end_of_part(text);
    const std::string_view part = text.substr(0, end);
    choose(strategy, part, collectives);
    strategy.name += "+" + std::string(part);
  }
  return strategy;
}

void validate_collectives(const Strategy& strategy, const MeshShape& mesh, Precision precision,
                          const CollectiveRegistry& collectives) {
  for (const CollectiveChoice& choice : kChoices) {
    const std::string& name = strategy.*choice.name;
    const CollectiveCapabilities can = collectives.make(choice.collective, name)->capabilities();
    const CollectiveUse use = use_of(choice.collective, strategy, mesh, precision);
    const std::string title = std::string(comm::name_of(choice.collective)) + " by " + name;
    if (!use.used) continue;
    if (!can.dtypes.empty() && std::find(can.dtypes.begin(), can.dtypes.end(), use.dtype) == can.dtypes.end()) {
      std::string known;
      for (const DType dtype : can.dtypes) known += " " + std::string(name_of(dtype));
      throw InvalidUsage(title + ": " + std::string(name_of(use.dtype)) + " is not supported, only" + known +
                         "; choose another plug-in, or another precision");
    }
    if (can.whole && use.shards)
      throw InvalidUsage(title + ": needs whole flat parameters, but strategy " + strategy.name +
                         " reduces shards; choose another plug-in");
    // [Note: gathers that round] A rounding gather may overwrite parameters only if they are also kept elsewhere: as
    // f32 master weights, or at rest. Here the owner would continue from its own values and the other ranks from
    // rounded ones; and if the owner's were rounded too, updates smaller than the rounding would be lost.
    if (!can.exact && use.overwrites)
      throw InvalidUsage(title + ": it rounds, but strategy " + strategy.name +
                         " gathers the only copy of the parameters after the step; use half precision, which keeps f32 "
                         "master weights, or a strategy that shards parameters at rest");
  }
}

}  // namespace tessera::fsdp
