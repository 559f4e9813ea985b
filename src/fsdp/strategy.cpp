#include "tessera/fsdp/strategy.h"

#include <algorithm>
#include <array>
#include <set>

#include "tessera/base/parse.h"
#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/mesh.h"
#include "tessera/fsdp/plugin.h"
#include "tessera/fsdp/precision.h"

namespace tessera::fsdp {
namespace {

/// Shards within a replica; replicas synchronize after every 10 steps.
Strategy periodic(std::string name, const OuterOptimizer& outer) {
  const Axes shard = {kShardAxis};
  const Sync sync{.when = Sync::When::period, .what = Sync::What::parameter_delta, .period = 10, .outer = outer};
  return {.name = std::move(name),
          .param_at_rest = shard,
          .param_after_forward = shard,
          .gradient = shard,
          .optimizer = shard,
          .sync = {{kReplicateAxis, sync}},
          .two_axes = true};
}

std::vector<Strategy> presets() {
  const Axes none;
  const Axes shard = {kShardAxis};
  return {
      {.name = "ddp", .param_at_rest = none, .param_after_forward = none, .gradient = none, .optimizer = none},
      {.name = "zero1", .param_at_rest = none, .param_after_forward = none, .gradient = none, .optimizer = shard},
      {.name = "zero2", .param_at_rest = none, .param_after_forward = none, .gradient = shard, .optimizer = shard},
      {.name = "fsdp", .param_at_rest = shard, .param_after_forward = shard, .gradient = shard, .optimizer = shard},
      {.name = "hsdp",
       .param_at_rest = shard,
       .param_after_forward = shard,
       .gradient = shard,
       .optimizer = shard,
       .two_axes = true},
      {.name = "shard_grad_op",
       .param_at_rest = shard,
       .param_after_forward = none,
       .gradient = shard,
       .optimizer = shard},
      periodic("diloco", {.learning_rate = 0.7, .momentum = 0.9, .nesterov = true}),
      periodic("local_sgd", {}),
  };
}

constexpr struct {
  std::string_view alias;
  std::string_view name;
} kAliases[] = {{"no_shard", "ddp"}, {"full_shard", "fsdp"}, {"hybrid_shard", "hsdp"}};

std::string to_string(const Axes& axes) {
  if (axes.empty()) return "on every rank";
  std::string text = "sharded over ";
  for (const Axis& axis : axes) text += (axis == *axes.begin() ? "" : ", ") + axis;
  return text;
}

void require_subset(const Axes& inner, const Axes& outer, const std::string& name, std::string_view rule) {
  for (const Axis& axis : inner)
    if (!outer.contains(axis))
      throw InvalidUsage("strategy " + name + ": " + std::string(rule) + " (axis " + axis + ")");
}

/// Shards are divided from the innermost axis outward. A kind of state that is sharded over fewer axes than the next
/// kind must therefore be sharded over the inner ones: otherwise its shards would not contain those of the next kind.
void require_inner(const Strategy& s, const Axes& fewer, const Axes& more, const MeshShape& mesh,
                   const std::string& what) {
  Axis without;
  for (auto axis = mesh.axes.rbegin(); axis != mesh.axes.rend(); ++axis) {
    if (axis->size == 1 || !more.contains(axis->name)) continue;
    if (!fewer.contains(axis->name)) {
      without = axis->name;
    } else if (!without.empty()) {
      throw Unsupported("strategy " + s.name + ": " + what +
                        " can stay sharded only over inner axes of the mesh, not over " + axis->name + " without " +
                        without);
    }
  }
}

void validate_sync(const Strategy& s, const Axis& axis, const Sync& sync) {
  const std::string what = "strategy " + s.name + ": axis " + axis;
  const bool periodic = sync.when == Sync::When::period;
  if (periodic != (sync.what == Sync::What::parameter_delta))
    throw Unsupported(what + ": gradients are reduced every microbatch or step, parameter deltas once per sync period");
  if (!periodic) return;
  if (s.optimizer.contains(axis)) throw InvalidUsage(what + " is sharded, but only replicas may have a sync period");
  if (s.param_at_rest != s.optimizer)
    throw Unsupported(what + " has a sync period: parameters must be sharded like the optimizer");
  if (sync.period < 1)
    throw InvalidUsage(what + ": a sync period of " + std::to_string(sync.period) + " steps, needs 1 or more");
  if (!(sync.outer.learning_rate > 0) || !(sync.outer.momentum >= 0 && sync.outer.momentum < 1))
    throw InvalidUsage(what + ": outer learning rate " + std::to_string(sync.outer.learning_rate) + ", momentum " +
                       std::to_string(sync.outer.momentum) +
                       "; the rate must be above 0, the momentum at least 0 and below 1");
}

}  // namespace

Axis periodic_axis(const Strategy& strategy) {
  for (const auto& [axis, sync] : strategy.sync)
    if (sync.when == Sync::When::period) return axis;
  return "";
}

Strategy with_period(Strategy strategy, const SyncOverrides& period) {
  const Axis axis = periodic_axis(strategy);
  if (axis.empty())
    throw InvalidUsage("strategy " + strategy.name + " reduces gradients in every step and has no sync period to set");
  Sync& sync = strategy.sync.at(axis);
  sync.period = period.steps.value_or(sync.period);
  sync.outer.learning_rate = period.outer_learning_rate.value_or(sync.outer.learning_rate);
  sync.outer.momentum = period.outer_momentum.value_or(sync.outer.momentum);
  sync.outer.nesterov = sync.outer.nesterov && sync.outer.momentum > 0;
  validate(strategy);
  return strategy;
}

Strategy strategy_named(std::string_view name) {
  if (is_plugin_name(name)) return plugin_strategy(name);
  for (const auto& entry : kAliases)
    if (entry.alias == name) name = entry.name;
  std::string known;
  for (Strategy& strategy : presets()) {
    if (strategy.name == name) return std::move(strategy);
    known += (known.empty() ? "" : " ") + strategy.name;
  }
  for (const auto& entry : kAliases) known += " " + std::string(entry.alias);
  throw InvalidUsage("unknown strategy '" + std::string(name) + "'; known: " + known + ", or FILE.so:NAME");
}

Strategy over_groups(Strategy strategy) {
  for (Axes* axes : {&strategy.param_at_rest, &strategy.gradient, &strategy.optimizer})
    if (axes->contains(kShardAxis)) axes->insert(kGroupAxis);
  if (const auto sync = strategy.sync.find(kShardAxis); sync != strategy.sync.end())
    strategy.sync[kGroupAxis] = sync->second;
  return strategy;
}

Accumulation parse_accumulation(std::string_view name) {
  constexpr std::array<std::string_view, 3> kNames = {"every", "last", "scatter"};
  return static_cast<Accumulation>(base::parse_name(name, "accumulation", kNames));
}

Strategy with_accumulation(Strategy strategy, Accumulation accumulation) {
  for (const Axis& axis : {kReplicateAxis, kShardAxis}) {
    if (axis == periodic_axis(strategy)) continue;
    const bool scattered = strategy.optimizer.contains(axis);
    const bool waits = accumulation == Accumulation::last || (accumulation == Accumulation::scatter && !scattered);
    strategy.sync[axis].when = waits ? Sync::When::step : Sync::When::microbatch;
  }
  return strategy;
}

std::vector<std::string> strategy_names() {
  std::vector<std::string> names;
  for (const Strategy& strategy : presets()) names.push_back(strategy.name);
  return names;
}

void validate(const Strategy& s) {
  require_subset(s.param_after_forward, s.param_at_rest, s.name,
                 "parameters can't be sharded after forward where they are not sharded at rest");
  require_subset(s.param_at_rest, s.optimizer, s.name, "where parameters are sharded, the optimizer must be too");
  require_subset(s.param_at_rest, s.gradient, s.name, "where parameters are sharded, gradients must be too");
  require_subset(s.gradient, s.optimizer, s.name, "where gradients are sharded, the optimizer must be too");
  for (const auto& [axis, sync] : s.sync) validate_sync(s, axis, sync);
}

void validate(const Strategy& s, const MeshShape& mesh) {
  validate(s);
  std::string known;
  for (const MeshAxis& axis : mesh.axes) known += " " + axis.name;
  const auto require = [&](const Axis& axis, std::string_view what) {
    const auto is_it = [&](const MeshAxis& each) { return each.name == axis; };
    if (std::none_of(mesh.axes.begin(), mesh.axes.end(), is_it))
      throw InvalidUsage("strategy " + s.name + ": " + std::string(what) + " axis " + axis +
                         ", which the mesh does not have; it has" + known);
  };
  // covers all kinds of state: see above
  for (const Axis& axis : s.optimizer) require(axis, "the optimizer is sharded over");
  if (const Axis axis = periodic_axis(s); !axis.empty()) require(axis, "replicas synchronize over");
  require_inner(s, s.param_after_forward, s.param_at_rest, mesh, "parameters after forward");
  require_inner(s, s.param_at_rest, s.gradient, mesh, "parameters");
  require_inner(s, s.gradient, s.optimizer, mesh, "gradients");
}

void require_offloadable(const Strategy& s) {
  if (s.optimizer.empty())  // then nothing is sharded: see validate()
    throw InvalidUsage("cpu offload: strategy " + s.name +
                       " shards nothing, and only shards can be offloaded; use a strategy that shards");
}

std::string describe(const Strategy& s) {
  return s.name + ": parameters " + to_string(s.param_at_rest) + ", after forward " + to_string(s.param_after_forward) +
         ", gradients " + to_string(s.gradient) + ", optimizer " + to_string(s.optimizer);
}

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
