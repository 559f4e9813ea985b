// Traffic of a step.
#include <utility>

#include "tessera/fsdp/flat_layout.h"
#include "tessera/fsdp/formulas/flat_parts.h"
#include "tessera/fsdp/sharding_plan.h"
#include "tessera/fsdp/wrap.h"

namespace tessera::fsdp {

using comm::OpKind;

int shard_count(const Axes& axes, const MeshShape& mesh) {
  int count = 1;
  for (const MeshAxis& axis : mesh.axes)
    if (axes.contains(axis.name)) count *= axis.size;
  return count;
}

std::uint64_t reductions_over(const Axis& axis, const Strategy& strategy, StepShape shape) {
  const auto sync = strategy.sync.find(axis);
  const bool once = sync != strategy.sync.end() && sync->second.when == Sync::When::step;
  return once ? 1 : static_cast<std::uint64_t>(shape.microbatches);
}

std::vector<Part> parts_of(const UnitSize& unit, Precision precision) {
  std::vector<Part> parts;
  const auto add = [&](const Part& part) {
    if (part.elements > 0) parts.push_back(part);
  };
  add({unit.trained(), precision, true, unit.shapes});
  add({unit.frozen - unit.bytes, precision, false, {}});
  add({unit.bytes, {DType::u8, DType::u8}, false, {}});
  for (const OtherFlat& other : unit.others) {
    const DType reduce = precision.casts() ? precision.reduce : other.precision.reduce;
    add({other.padded, {other.precision.compute, reduce}, other.trained, other.shapes});
  }
  return parts;
}

namespace {

/// How often a step gathers a unit over an axis over which it is sharded at rest.
std::uint64_t gathers_over(const Axis& axis, const Strategy& strategy, const UnitSize& unit, StepShape shape) {
  const auto microbatches = static_cast<std::uint64_t>(shape.microbatches);
  const std::uint64_t forwards = shape.reshard_after_backward ? microbatches : 1;
  const bool again = !unit.kept_after_forward && strategy.param_after_forward.contains(axis);
  return forwards + (again ? microbatches : 0);
}

/// Costs of one strategy's collectives, summed over units.
class Costs {
 public:
  Costs(const Strategy& strategy, const MeshShape& mesh, StepShape shape, const CollectiveRegistry& registry)
      : strategy_(strategy), mesh_(mesh), shape_(shape), registry_(registry) {}

  /// Gradients of one flat parameter: scattered where the optimizer is sharded, then all-reduced over the other axes.
  void add_reductions(const Part& part) {
    if (!part.trained) return;
    auto elements = static_cast<std::uint64_t>(part.elements);
    const auto size = [&](int ranks) { return CollectiveSize{elements, part.precision.reduce, ranks, part.shapes}; };
    const auto times = [&](const Axis& axis) { return reductions_over(axis, strategy_, shape_); };
    for (auto axis = mesh_.axes.rbegin(); axis != mesh_.axes.rend(); ++axis) {
      if (axis->size == 1 || !strategy_.optimizer.contains(axis->name)) continue;
      add(OpKind::reduce_scatter, strategy_.reduce_scatter, size(axis->size), times(axis->name));
      elements /= static_cast<std::uint64_t>(axis->size);
    }
    for (const MeshAxis& axis : mesh_.axes) {
      if (axis.size == 1 || strategy_.optimizer.contains(axis.name)) continue;
      if (axis.name == periodic_axis(strategy_)) {  // of f32 deltas
        add(OpKind::all_reduce, strategy_.all_reduce, {elements, DType::f32, axis.size, part.shapes}, 1);
      } else {
        add(OpKind::all_reduce, strategy_.all_reduce, size(axis.size), times(axis.name));
      }
    }
  }

  /// Gathers of one flat parameter, trained or frozen: before each forward and backward that does not find it
  /// unsharded, or once after the step where parameters are replicated. Outer axes come first, so the result over an
  /// axis is still sharded over the axes inside it.
  void add_gathers(const UnitSize& unit, const Part& part) {
    const DType dtype = part.precision.compute;
    const bool by_plain = dtype == DType::u8 &&
                          !registry_.make(OpKind::all_gather, strategy_.all_gather)->capabilities().gathers_quantized();
    const auto axes = std::span(mesh_.axes);
    for (std::size_t i = 0; i < axes.size(); ++i) {
      const Axis& axis = axes[i].name;
      const bool at_rest = strategy_.param_at_rest.contains(axis);
      if (axes[i].size == 1 || !strategy_.optimizer.contains(axis) || !(at_rest || part.trained)) continue;
      const Axes& cutting = at_rest ? strategy_.param_at_rest : strategy_.optimizer;
      std::uint64_t shards = 1;
      for (const MeshAxis& inner : axes.subspan(i + 1))
        if (cutting.contains(inner.name)) shards *= static_cast<std::uint64_t>(inner.size);
      add(OpKind::all_gather, by_plain ? "plain" : strategy_.all_gather,
          {static_cast<std::uint64_t>(part.elements) / shards, dtype, axes[i].size, part.shapes},
          at_rest ? gathers_over(axis, strategy_, unit, shape_) : 1);
    }
  }

  CommunicationFormula total;

 private:
  void add(OpKind collective, const std::string& plugin, const CollectiveSize& size, std::uint64_t times) {
    const CollectiveCost cost = registry_.cost(collective, plugin, size);
    const auto field = collective == OpKind::all_gather       ? &TrafficVolume::all_gather
                       : collective == OpKind::reduce_scatter ? &TrafficVolume::reduce_scatter
                                                              : &TrafficVolume::all_reduce;
    total.calls.*field += times * cost.calls;
    total.bytes.*field += times * cost.bytes;
  }
  const Strategy& strategy_;
  const MeshShape& mesh_;
  const StepShape shape_;
  const CollectiveRegistry& registry_;
};

}  // namespace

void add_flat(UnitSize& unit, const FlatLayout& flat, DType model, std::optional<DType> reduce) {
  std::vector<Shape> shapes;
  if (flat.trainable)
    for (const FlatEntry& entry : flat.entries) shapes.push_back(entry.parameter->shape());
  if (flat.dtype != model && flat.dtype != DType::u8) {
    unit.others.push_back({make_precision(flat.dtype, reduce), flat.padded, flat.trainable, std::move(shapes)});
    return;
  }
  unit.padded += flat.padded;
  if (!flat.trainable) unit.frozen += flat.padded;
  if (flat.dtype == DType::u8) unit.bytes += flat.padded;
  unit.shapes.insert(unit.shapes.end(), shapes.begin(), shapes.end());
}

std::vector<UnitSize> planned_units(Module& model, std::string_view wrap, const Strategy& strategy,
                                    const MeshShape& mesh, std::optional<bool> reshard_after_forward) {
  const std::vector<UnitSpec> specs = make_units(model, wrap);
  const bool sharded = shard_count(strategy.param_after_forward, mesh) > 1;
  std::vector<UnitSize> sizes;
  for (const UnitSpec& spec : specs) {
    UnitSize& size = sizes.emplace_back();
    size.is_root = spec.is_root;
    size.kept_after_forward =
        keeps_after_forward(sharded, spec.is_root, sizes.size() == specs.size(), reshard_after_forward);
    for (const FlatLayout& layout : make_layouts(spec.parameters, mesh.size())) add_flat(size, layout, model.dtype());
  }
  return sizes;
}

CommunicationFormula communication_formula(const Strategy& strategy, const MeshShape& mesh,
                                           std::span<const UnitSize> units, Precision precision, StepShape shape,
                                           const CollectiveRegistry& collectives) {
  Costs costs(strategy, mesh, shape, collectives);
  for (const UnitSize& unit : units)
    for (const Part& part : parts_of(unit, precision)) {
      costs.add_reductions(part);
      costs.add_gathers(unit, part);
    }
  if (const Axis axis = periodic_axis(strategy); !axis.empty()) {  // the mean over steps
    const auto period = static_cast<std::uint64_t>(strategy.sync.at(axis).period);
    costs.total.calls.all_reduce /= period;
    costs.total.bytes.all_reduce /= period;
  }
  return costs.total;
}

}  // namespace tessera::fsdp
