#include "tessera/fsdp/strategy.h"

#include <algorithm>

namespace tessera::fsdp {
namespace {

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

}  // namespace

Strategy strategy_named(std::string_view name) {
  for (const auto& entry : kAliases)
    if (entry.alias == name) name = entry.name;
  std::string known;
  for (Strategy& strategy : presets()) {
    if (strategy.name == name) return std::move(strategy);
    known += (known.empty() ? "" : " ") + strategy.name;
  }
  for (const auto& entry : kAliases) known += " " + std::string(entry.alias);
  throw InvalidUsage("unknown strategy '" + std::string(name) + "'; known: " + known);
}

Strategy default_strategy() { return strategy_named("fsdp"); }

Strategy over_groups(Strategy strategy) {
  for (Axes* axes : {&strategy.param_at_rest, &strategy.gradient, &strategy.optimizer})
    if (axes->contains(kShardAxis)) axes->insert(kGroupAxis);
  if (const auto sync = strategy.sync.find(kShardAxis); sync != strategy.sync.end())
    strategy.sync[kGroupAxis] = sync->second;
  return strategy;
}

Accumulation parse_accumulation(std::string_view name) {
  if (name == "every") return Accumulation::every;
  if (name == "last") return Accumulation::last;
  if (name == "scatter") return Accumulation::scatter;
  throw InvalidUsage("unknown accumulation '" + std::string(name) + "'; known: every last scatter");
}

Strategy with_accumulation(Strategy strategy, Accumulation accumulation) {
  for (const Axis& axis : {kReplicateAxis, kShardAxis}) {
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
                 "parameters can't be sharded after forward where they are not at rest");
  require_subset(s.param_at_rest, s.optimizer, s.name, "where parameters are sharded, the optimizer must be too");
  require_subset(s.param_at_rest, s.gradient, s.name, "where parameters are sharded, gradients must be too");
  require_subset(s.gradient, s.optimizer, s.name, "where gradients are sharded, the optimizer must be too");
  for (const auto& [axis, sync] : s.sync)
    if (sync.when == Sync::When::period || sync.what != Sync::What::gradient)
      throw Unsupported("strategy " + s.name + ": axis " + axis +
                        " wants a period or deltas; gradients every microbatch or step are supported");
}

void require_offloadable(const Strategy& s) {
  if (s.optimizer.empty())  // then nothing is sharded: see validate()
    throw InvalidUsage("cpu offload: strategy " + s.name +
                       " shards nothing, and what every rank computes with stays on the device; use one that shards");
}

std::string describe(const Strategy& s) {
  return s.name + ": parameters " + to_string(s.param_at_rest) + ", after forward " + to_string(s.param_after_forward) +
         ", gradients " + to_string(s.gradient) + ", optimizer " + to_string(s.optimizer);
}

}  // namespace tessera::fsdp
