#include "tessera/fsdp/sharding_plan.h"

#include <algorithm>
#include <string>

#include "tessera/base/error.h"
#include "tessera/fsdp/flat_layout.h"
#include "tessera/fsdp/precision.h"

namespace tessera::fsdp {
namespace {

/// Slices along `axes`, or along the mesh's other axes if not `inside`.
std::vector<ShardingPlan::AxisSlice> slices_along(const Axes& axes, const Mesh& mesh, bool inside) {
  std::vector<ShardingPlan::AxisSlice> slices;
  const auto& all = mesh.shape().axes;
  for (auto axis = all.rbegin(); axis != all.rend(); ++axis)
    if (axis->size > 1 && axes.contains(axis->name) == inside)
      slices.push_back({axis->name, axis->size, mesh.coordinate(axis->name)});
  return slices;
}

ShardingPlan::OffloadedState offloaded_by(const Strategy& strategy) {
  require_offloadable(strategy);
  return {!strategy.param_at_rest.empty(), !strategy.gradient.empty(), !strategy.optimizer.empty()};
}

/// The number of leading reductions that run for every microbatch.
std::size_t reduced_each(const ShardingPlan& plan, const Strategy& strategy) {
  const auto waits = [&](const ReduceStage& stage) {
    const auto sync = strategy.sync.find(stage.axis);
    return sync != strategy.sync.end() && sync->second.when == Sync::When::step;
  };
  const auto first = std::find_if(plan.reductions.begin(), plan.reductions.end(), waits);
  for (auto stage = first; stage != plan.reductions.end(); ++stage) {
    if (!waits(*stage))
      throw Unsupported("strategy " + strategy.name + ": gradients can't be reduced over axis " + stage->axis +
                        " every microbatch if they are reduced over axis " + first->axis +
                        " first, but only once a step");
    if (stage->to_kept && first != plan.reductions.begin())
      throw Unsupported("strategy " + strategy.name + ": gradients at rest are sharded over axis " + stage->axis +
                        ", so they must be reduced over it as often as over axis " + plan.reductions.front().axis);
  }
  return static_cast<std::size_t>(first - plan.reductions.begin());
}

std::optional<ShardingPlan::SyncPlan> periodic_of(const Strategy& strategy, const Mesh& mesh) {
  const Axis axis = periodic_axis(strategy);
  if (axis.empty()) return std::nullopt;
  const Sync& sync = strategy.sync.at(axis);
  return ShardingPlan::SyncPlan{axis, mesh.shape().size_of(axis), sync.period, sync.outer};
}

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

ElementRange narrow(ElementRange range, std::span<const ShardingPlan::AxisSlice> slices) {
  for (const ShardingPlan::AxisSlice& slice : slices) {
    const std::int64_t part = range.count() / slice.size;
    range = {range.begin + part * slice.coordinate, range.begin + part * (slice.coordinate + 1)};
  }
  return range;
}

std::vector<ShardingPlan::AxisSlice> slices_of(const Axes& axes, const Mesh& mesh) {
  return slices_along(axes, mesh, true);
}

ElementRange ShardingPlan::rest(std::int64_t padded) const { return narrow({0, padded}, rest_slices); }
ElementRange ShardingPlan::unsharded(std::int64_t padded, std::size_t gathered) const {
  return narrow({0, padded}, std::span(rest_slices).first(rest_slices.size() - gathered));
}
ElementRange ShardingPlan::gradient_range(std::int64_t padded) const { return narrow({0, padded}, gradient_slices); }
ElementRange ShardingPlan::optimizer(std::int64_t padded) const { return narrow({0, padded}, optimizer_slices); }

ElementRange ShardingPlan::own(std::int64_t padded) const { return narrow(optimizer(padded), optimizer_copies); }
ElementRange ShardingPlan::own_frozen(std::int64_t padded) const { return narrow(rest(padded), rest_copies); }

ElementRange ShardingPlan::after_gathers(std::int64_t padded, std::size_t gathered) const {
  return narrow({0, padded}, std::span(optimizer_slices).first(optimizer_slices.size() - gathered));
}

ShardingPlan make_plan(const Strategy& strategy, const Mesh& mesh, bool cpu_offload) {
  validate(strategy, mesh.shape());
  ShardingPlan plan;
  if (cpu_offload) plan.offloaded = offloaded_by(strategy);
  plan.rest_slices = slices_of(strategy.param_at_rest, mesh);
  plan.gradient_slices = slices_of(strategy.gradient, mesh);
  plan.optimizer_slices = slices_of(strategy.optimizer, mesh);
  plan.rest_copies = slices_along(strategy.param_at_rest, mesh, false);
  plan.optimizer_copies = slices_along(strategy.optimizer, mesh, false);
  plan.forward_slices = slices_of(strategy.param_after_forward, mesh);
  plan.periodic = periodic_of(strategy, mesh);
  const int replicas_apart = plan.periodic ? plan.periodic->replicas : 1;
  const auto is_periodic = [&](const Axis& axis) { return plan.periodic && plan.periodic->axis == axis; };
  if (plan.periodic && cpu_offload)
    throw Unsupported("cpu offload: strategy " + strategy.name +
                      " has a sync period, and its state must stay on the device");

  if (!plan.rest_slices.empty()) {
    for (auto slice = plan.rest_slices.rbegin(); slice != plan.rest_slices.rend(); ++slice)
      plan.gather_axes.push_back(slice->axis);
    plan.sharded_after_forward = !plan.forward_slices.empty();
    plan.keeps_secondary = plan.sharded_after_forward && plan.forward_slices.size() < plan.rest_slices.size();
  } else if (plan.offloaded.parameters) {
    plan.sharded_after_forward = !strategy.param_after_forward.empty();
  }
  plan.unshards_to_lease = !plan.gather_axes.empty() || plan.offloaded.parameters;
  plan.gradient_sharded = !plan.gradient_slices.empty() || plan.offloaded.gradients;
  for (const ShardingPlan::AxisSlice& slice : plan.optimizer_slices) {
    // Only the last stage produces the kept gradients; offloaded ones are copied to the host from the lease.
    const bool to_kept =
        !plan.gradient_slices.empty() && slice.axis == plan.gradient_slices.back().axis && !plan.offloaded.gradients;
    plan.reductions.push_back({slice.axis, true, to_kept, comm::ReduceOp::sum()});
  }
  // From the innermost axis outward, as ranks are numbered, so that sums form the same tree as on one axis.
  const auto& axes = mesh.shape().axes;
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis)
    if (axis->size > 1 && !strategy.optimizer.contains(axis->name) && !is_periodic(axis->name))
      plan.reductions.push_back({axis->name, false, false, comm::ReduceOp::sum()});
  if (!plan.reductions.empty()) plan.reductions.back().op = comm::ReduceOp::average_over(mesh.size() / replicas_apart);
  plan.reduced_each = reduced_each(plan, strategy);
  for (auto slice = plan.optimizer_slices.rbegin(); slice != plan.optimizer_slices.rend(); ++slice)
    if (!strategy.param_at_rest.contains(slice->axis)) plan.gather_after_step.push_back(slice->axis);
  if (plan.offloaded.parameters && !plan.gather_after_step.empty())
    throw Unsupported("cpu offload: strategy " + strategy.name + " gathers parameters over axis " +
                      plan.gather_after_step.front() + " after the step, so they must stay on the device");
  return plan;
}

std::vector<ElementRange> FlatLayout::gaps() const {
  std::vector<ElementRange> out;
  std::int64_t position = 0;
  for (const FlatEntry& entry : entries) {
    if (entry.offset > position) out.push_back({position, entry.offset});
    position = entry.end();
  }
  if (padded > position) out.push_back({position, padded});
  return out;
}

std::vector<FlatLayout> make_layouts(std::span<const std::shared_ptr<Parameter>> parameters, int world) {
  std::vector<FlatLayout> layouts;
  for (const auto& parameter : parameters) {
    const bool trainable = parameter->requires_grad();
    auto found = std::find_if(layouts.begin(), layouts.end(), [&](const FlatLayout& layout) {
      return layout.dtype == parameter->dtype() && layout.trainable == trainable;
    });
    if (found == layouts.end()) {
      layouts.push_back({.dtype = parameter->dtype(), .trainable = trainable});
      found = std::prev(layouts.end());
    }
    const std::int64_t offset = found->entries.empty() ? 0 : round_up(found->entries.back().end(), kFlatAlignment);
    found->entries.push_back({parameter, offset});
    found->elements += parameter->count();
  }
  for (FlatLayout& layout : layouts) layout.padded = round_up(layout.entries.back().end(), kFlatAlignment * world);
  return layouts;
}

ElementRange within(const FlatEntry& entry, ElementRange range) {
  const std::int64_t begin = std::max(range.begin, entry.offset);
  const std::int64_t end = std::min(range.end, entry.end());
  if (begin >= end) return {0, 0};
  return {begin - entry.offset, end - entry.offset};
}

Precision make_precision(DType compute, std::optional<DType> reduce) {
  const Precision precision{compute, reduce.value_or(compute)};
  const auto name = [](DType dtype) { return std::string(base::name_of(dtype)); };
  if (compute != DType::f32 && compute != DType::bf16 && compute != DType::f16)
    throw base::Unsupported("precision: parameters of dtype " + name(compute) +
                            " are not supported; use f32, bf16 or f16");
  if (precision.casts() && precision.reduce != DType::f32)
    throw base::Unsupported("precision: gradients of " + name(compute) + " can't be reduced in " +
                            name(precision.reduce) + "; use " + name(compute) +
                            (precision.has_master_weights() ? " or f32" : ""));
  return precision;
}

}  // namespace tessera::fsdp
