#include "tessera/fsdp/formulas.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "tessera/fsdp/flat_layout.h"
#include "tessera/fsdp/sharding_plan.h"
#include "tessera/fsdp/wrap.h"

namespace tessera::fsdp {
namespace {

using comm::OpKind;

/// A flat parameter, and whether a step updates it.
struct Part {
  std::int64_t elements = 0;
  Precision precision;
  bool trained = false;
  std::span<const Shape> shapes = {};

  std::uint64_t values() const { return of(precision.compute); }
  std::uint64_t of(DType dtype) const { return static_cast<std::uint64_t>(elements) * size_of(dtype); }
};

/// Number of shards over these axes.
int shard_count(const Axes& axes, const MeshShape& mesh) {
  int count = 1;
  for (const MeshAxis& axis : mesh.axes)
    if (axes.contains(axis.name)) count *= axis.size;
  return count;
}

/// How often a step reduces over an axis.
std::uint64_t reductions_over(const Axis& axis, const Strategy& strategy, StepShape shape) {
  const auto sync = strategy.sync.find(axis);
  const bool once = sync != strategy.sync.end() && sync->second.when == Sync::When::step;
  return once ? 1 : static_cast<std::uint64_t>(shape.microbatches);
}

/// `precision`: of the parameters that have the model's dtype.
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

/// Whether nothing is reduced before the last microbatch.
bool holds_gradients(const Strategy& strategy, const MeshShape& mesh, StepShape shape) {
  if (shape.microbatches == 1) return false;
  return std::all_of(mesh.axes.begin(), mesh.axes.end(), [&](const MeshAxis& axis) {
    return axis.size == 1 || reductions_over(axis.name, strategy, shape) == 1;
  });
}

/// Number of units before the computing one that still hold full gradients: one, which is being scattered. With
/// microbatches, a unit's gradients stay until they are reduced over all axes that reduce every microbatch.
std::size_t units_behind(const Strategy& strategy, const MeshShape& mesh, StepShape shape) {
  if (shape.microbatches == 1) return 1;
  return static_cast<std::size_t>(std::count_if(mesh.axes.begin(), mesh.axes.end(), [&](const MeshAxis& axis) {
    return axis.size > 1 && reductions_over(axis.name, strategy, shape) > 1;
  }));
}

/// Bytes of a unit's gradients in flight: those that a backward writes to be cast for reduction, their cast form, and
/// those that are reduced without a cast.
struct GradientBytes {
  std::uint64_t written = 0, cast = 0, plain = 0;
  std::uint64_t reduced() const { return cast + plain; }
};

GradientBytes gradient_bytes(const UnitSize& unit, Precision precision) {
  GradientBytes bytes;
  for (const Part& part : parts_of(unit, precision)) {
    if (!part.trained) continue;
    (part.precision.casts() ? bytes.written : bytes.plain) += part.values();
    if (part.precision.casts()) bytes.cast += part.of(part.precision.reduce);
  }
  return bytes;
}

/// Peak of gradients in flight: the root's from the beginning, and all forms of one unit while `behind` units before it
/// are reduced. `leased`: reduced gradients are leased too. The root's own reduction comes last, when the first units
/// are behind.
std::uint64_t flowing_gradients(std::span<const UnitSize> units, bool leased, std::size_t behind, Precision precision) {
  GradientBytes root;
  std::vector<GradientBytes> inner;
  for (const UnitSize& unit : units) {
    GradientBytes bytes = gradient_bytes(unit, precision);
    if (!leased) bytes.cast = bytes.plain = 0;
    if (unit.is_root) {
      root = bytes;
    } else {
      inner.push_back(bytes);
    }
  }
  const auto reduced = [&](std::size_t begin) {
    std::uint64_t sum = 0;
    for (std::size_t i = begin; i < std::min(begin + behind, inner.size()); ++i) sum += inner[i].reduced();
    return sum;
  };
  std::uint64_t most = root.written + root.reduced() + reduced(0);
  for (std::size_t i = 0; i < inner.size(); ++i)
    most = std::max(most, root.written + root.plain + inner[i].written + inner[i].reduced() + reduced(i + 1));
  return most;
}

/// All full gradients, unless they are held in the kept buffer; where they are cast, also what one unit and the root
/// write, and the cast form of one unit before it is added.
std::uint64_t held_gradients(std::span<const UnitSize> units, bool leased, Precision precision) {
  std::uint64_t held = 0, root = 0, most = 0;
  for (const UnitSize& unit : units) {
    const GradientBytes bytes = gradient_bytes(unit, precision);
    if (leased) held += bytes.reduced();
    if (unit.is_root) root = bytes.written;
    most = std::max(most, unit.is_root ? bytes.cast : bytes.written + bytes.cast);
  }
  return held + root + most;
}

std::uint64_t parameter_bytes(const UnitSize& unit, Precision precision) {
  std::uint64_t bytes = 0;
  for (const Part& part : parts_of(unit, precision)) bytes += part.values();
  return bytes;
}

/// Secondary shards: units between forward and backward where they are sharded over fewer axes than at rest.
std::uint64_t secondary_parts(const Strategy& strategy, const MeshShape& mesh, std::span<const UnitSize> units,
                              Precision precision) {
  const int after_forward = shard_count(strategy.param_after_forward, mesh);
  if (after_forward == 1 || after_forward == shard_count(strategy.param_at_rest, mesh)) return 0;
  std::uint64_t bytes = 0;
  for (const UnitSize& unit : units)
    if (!unit.kept_after_forward) bytes += parameter_bytes(unit, precision) / static_cast<std::uint64_t>(after_forward);
  return bytes;
}

/// The peak size of `width` neighboring units, and the root beside them.
std::uint64_t largest_window(std::span<const UnitSize> units, std::size_t width, Precision precision) {
  std::uint64_t root = 0, most = 0;
  std::vector<std::uint64_t> inner;
  for (const UnitSize& unit : units) {
    const std::uint64_t bytes = parameter_bytes(unit, precision);
    if (unit.is_root) {
      root = bytes;
    } else {
      inner.push_back(bytes);
    }
  }
  for (std::size_t i = 0; i < inner.size(); ++i) {
    const auto first = inner.begin() + static_cast<std::ptrdiff_t>(i);
    const auto count = static_cast<std::ptrdiff_t>(std::min(width, inner.size() - i));
    most = std::max(most, std::accumulate(first, first + count, std::uint64_t{0}));
  }
  return root + most;
}

ModelStateBytes state_of(const Strategy& strategy, const MeshShape& mesh, const Part& part, int slots) {
  if (part.trained) return model_state_formula(strategy, mesh, part.elements, slots, part.precision);
  return {.parameter = part.values() / static_cast<std::uint64_t>(shard_count(strategy.param_at_rest, mesh))};
}

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

ModelStateBytes model_state_formula(const Strategy& strategy, const MeshShape& mesh, std::int64_t padded, int slots,
                                    Precision precision) {
  const auto sharded_bytes = [&](const Axes& axes, DType dtype) {
    return static_cast<std::uint64_t>(padded) * size_of(dtype) / static_cast<std::uint64_t>(shard_count(axes, mesh));
  };
  int values = slots + (precision.has_master_weights() ? 1 : 0);
  if (const Axis axis = periodic_axis(strategy); !axis.empty())  // anchor and outer momentum
    values += strategy.sync.at(axis).outer.momentum > 0 ? 2 : 1;
  return {sharded_bytes(strategy.param_at_rest, precision.compute), sharded_bytes(strategy.gradient, precision.reduce),
          sharded_bytes(strategy.optimizer, DType::f32) * static_cast<std::uint64_t>(values)};
}

ModelStateBytes model_state_formula(const Strategy& strategy, const MeshShape& mesh, std::span<const UnitSize> units,
                                    int slots, Precision precision) {
  ModelStateBytes total;
  for (const UnitSize& unit : units)
    for (const Part& part : parts_of(unit, precision)) {
      const ModelStateBytes state = state_of(strategy, mesh, part, slots);
      total.parameter += state.parameter;
      total.gradient += state.gradient;
      total.optimizer += state.optimizer;
    }
  return total;
}

ModelStateBytes with_offload(const Strategy& strategy, ModelStateBytes state) {
  const auto move = [&](const Axes& axes, std::uint64_t& bytes) {
    if (!axes.empty()) state.offloaded += std::exchange(bytes, 0);
  };
  move(strategy.param_at_rest, state.parameter);
  move(strategy.gradient, state.gradient);
  move(strategy.optimizer, state.optimizer);
  return state;
}

OffloadBytes offload_formula(const Strategy& strategy, const MeshShape& mesh, std::span<const UnitSize> units,
                             int slots, Precision precision) {
  OffloadBytes total;
  const auto add = [&](const UnitSize& unit, const Part& part) {
    const ModelStateBytes state = state_of(strategy, mesh, part, slots);
    if (!strategy.param_at_rest.empty()) {
      total.to_device += state.parameter * (unit.kept_after_forward ? 1 : 2);  // for each gather
      if (!part.trained) return;
      if (!part.precision.has_master_weights()) total.to_device += state.parameter;  // for the update
      total.to_host += state.parameter;
    }
    if (!strategy.gradient.empty()) {
      total.to_device += state.gradient;
      total.to_host += state.gradient;
    }
    total.to_device += state.optimizer;
    total.to_host += state.optimizer;
  };
  for (const UnitSize& unit : units)
    for (const Part& part : parts_of(unit, precision)) add(unit, part);
  return total;
}

PeakBounds peak_formula(const Strategy& strategy, const MeshShape& mesh, std::span<const UnitSize> units,
                        StepShape shape, Precision precision) {
  const bool keeps_all =
      std::all_of(units.begin(), units.end(), [](const UnitSize& u) { return u.kept_after_forward; }) ||
      (shape.microbatches > 1 && !shape.reshard_after_backward);
  PeakBounds bounds;
  if (shard_count(strategy.param_at_rest, mesh) > 1)
    bounds.unsharded_parameter =
        secondary_parts(strategy, mesh, units, precision) +
        largest_window(units, keeps_all ? units.size() : static_cast<std::size_t>(shape.prefetch) + 1, precision);
  if (holds_gradients(strategy, mesh, shape)) {
    bounds.unsharded_gradient = held_gradients(units, shard_count(strategy.gradient, mesh) > 1, precision);
    return bounds;
  }
  // Kept gradients of earlier microbatches occupy the buffer, so the next microbatch needs a lease.
  const bool leased = shard_count(strategy.gradient, mesh) > 1 || (shape.microbatches > 1 && mesh.size() > 1);
  bounds.unsharded_gradient = flowing_gradients(units, leased, units_behind(strategy, mesh, shape), precision);
  return bounds;
}

}  // namespace tessera::fsdp
