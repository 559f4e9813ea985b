#include "tessera/fsdp/formulas.h"

#include <algorithm>
#include <utility>

#include "tessera/fsdp/flat.h"
#include "tessera/fsdp/plan.h"
#include "tessera/fsdp/wrap.h"

namespace tessera::fsdp {

using comm::OpKind;

namespace {

int parts(const Axes& axes, const MeshShape& mesh) {
  int count = 1;
  for (const MeshAxis& axis : mesh.axes)
    if (axes.contains(axis.name)) count *= axis.size;
  return count;
}

/// How often a step reduces over an axis.
std::uint64_t reductions_over(const Axis& axis, const Strategy& strategy, StepCourse course) {
  const auto sync = strategy.sync.find(axis);
  const bool once = sync != strategy.sync.end() && sync->second.when == Sync::When::step;
  return once ? 1 : static_cast<std::uint64_t>(course.microbatches);
}

/// How often a step gathers a unit over an axis over which it is sharded at rest.
std::uint64_t gathers_over(const Axis& axis, const Strategy& strategy, const UnitSize& unit, StepCourse course) {
  const auto microbatches = static_cast<std::uint64_t>(course.microbatches);
  const std::uint64_t forwards = course.reshard_after_backward ? microbatches : 1;
  const bool again = !unit.kept_after_forward && strategy.param_after_forward.contains(axis);
  return forwards + (again ? microbatches : 0);
}

/// A flat parameter, and whether a step changes it.
struct Gathered {
  std::int64_t elements = 0;
  DType dtype = DType::f32;
  bool trained = false;
};

/// Costs of one strategy's collectives, summed over units.
class Costs {
 public:
  Costs(const Strategy& strategy, const MeshShape& mesh, Precision precision, StepCourse course,
        const CollectiveRegistry& registry)
      : strategy_(strategy), mesh_(mesh), precision_(precision), course_(course), registry_(registry) {}

  /// Gradients of one flat parameter: scattered where the optimizer is sharded, then all-reduced over the other axes.
  void add_reductions(const UnitSize& unit) {
    auto elements = static_cast<std::uint64_t>(unit.trained());
    if (elements == 0) return;
    const auto size = [&](int ranks) { return CollectiveSize{elements, precision_.reduce, ranks, unit.shapes}; };
    const auto times = [&](const Axis& axis) { return reductions_over(axis, strategy_, course_); };
    for (auto axis = mesh_.axes.rbegin(); axis != mesh_.axes.rend(); ++axis) {
      if (axis->size == 1 || !strategy_.optimizer.contains(axis->name)) continue;
      add(OpKind::reduce_scatter, strategy_.reduce_scatter, size(axis->size), times(axis->name));
      elements /= static_cast<std::uint64_t>(axis->size);
    }
    for (const MeshAxis& axis : mesh_.axes) {
      if (axis.size == 1 || strategy_.optimizer.contains(axis.name)) continue;
      if (axis.name == periodic_axis(strategy_)) {  // of f32 deltas
        add(OpKind::all_reduce, strategy_.all_reduce, {elements, DType::f32, axis.size, unit.shapes}, 1);
      } else {
        add(OpKind::all_reduce, strategy_.all_reduce, size(axis.size), times(axis.name));
      }
    }
  }

  /// Of what a step changes, or of what it doesn't: before each forward and backward that doesn't find it, or once
  /// after the step where parameters are replicated. Outer axes come first, so what an axis makes is still cut by those
  /// inside it.
  void add_gathers(const UnitSize& unit, const Gathered& part) {
    if (part.elements == 0) return;
    const bool by_plain = part.dtype == DType::u8 &&
                          !registry_.make(OpKind::all_gather, strategy_.all_gather)->capabilities().carries_encodings();
    const auto axes = std::span(mesh_.axes);
    for (std::size_t i = 0; i < axes.size(); ++i) {
      const Axis& axis = axes[i].name;
      const bool at_rest = strategy_.param_at_rest.contains(axis);
      if (axes[i].size == 1 || !strategy_.optimizer.contains(axis) || !(at_rest || part.trained)) continue;
      const Axes& cutting = at_rest ? strategy_.param_at_rest : strategy_.optimizer;
      std::uint64_t cut = 1;
      for (const MeshAxis& inner : axes.subspan(i + 1))
        if (cutting.contains(inner.name)) cut *= static_cast<std::uint64_t>(inner.size);
      add(OpKind::all_gather, by_plain ? "plain" : strategy_.all_gather,
          {static_cast<std::uint64_t>(part.elements) / cut, part.dtype, axes[i].size, unit.shapes},
          at_rest ? gathers_over(axis, strategy_, unit, course_) : 1);
    }
  }

  CommunicationFormula total;

 private:
  void add(OpKind collective, const std::string& plugin, const CollectiveSize& size, std::uint64_t times) {
    const CollectiveCost cost = registry_.cost(collective, plugin, size);
    const auto field = collective == OpKind::all_gather       ? &Volume::all_gather
                       : collective == OpKind::reduce_scatter ? &Volume::reduce_scatter
                                                              : &Volume::all_reduce;
    total.calls.*field += times * cost.calls;
    total.bytes.*field += times * cost.bytes;
  }
  const Strategy& strategy_;
  const MeshShape& mesh_;
  const Precision precision_;
  const StepCourse course_;
  const CollectiveRegistry& registry_;
};

/// Nothing is reduced before the last microbatch.
bool holds_gradients(const Strategy& strategy, const MeshShape& mesh, StepCourse course) {
  if (course.microbatches == 1) return false;
  return std::all_of(mesh.axes.begin(), mesh.axes.end(), [&](const MeshAxis& axis) {
    return axis.size == 1 || reductions_over(axis.name, strategy, course) == 1;
  });
}

/// How many units before the one that computes still hold full gradients: one, that is scattered. Where there are
/// microbatches, a unit's gradients stay until they are reduced over all axes that this happens on for each of them.
std::size_t units_behind(const Strategy& strategy, const MeshShape& mesh, StepCourse course) {
  if (course.microbatches == 1) return 1;
  return static_cast<std::size_t>(std::count_if(mesh.axes.begin(), mesh.axes.end(), [&](const MeshAxis& axis) {
    return axis.size > 1 && reductions_over(axis.name, strategy, course) > 1;
  }));
}

/// All of them, unless they are held where they are kept; where they are cast, also what one unit and the root write,
/// and what becomes of one before it is added.
std::uint64_t held_gradients(std::span<const UnitSize> units, bool leased, Precision precision) {
  std::uint64_t all = 0, root = 0, largest = 0;
  for (const UnitSize& unit : units) {
    const auto elements = static_cast<std::uint64_t>(unit.trained());
    all += elements;
    (unit.is_root ? root : largest) = std::max(unit.is_root ? root : largest, elements);
  }
  const std::uint64_t compute = size_of(precision.compute), reduce = size_of(precision.reduce);
  const std::uint64_t held = leased ? all * reduce : 0;
  if (!precision.casts()) return held;
  return held + root * compute + std::max(largest * (compute + reduce), root * reduce);
}

std::uint64_t frozen_bytes(const UnitSize& unit, Precision precision) {
  return static_cast<std::uint64_t>(unit.frozen - unit.bytes) * size_of(precision.compute) +
         static_cast<std::uint64_t>(unit.bytes);
}

std::uint64_t parameter_bytes(const UnitSize& unit, Precision precision) {
  return static_cast<std::uint64_t>(unit.trained()) * size_of(precision.compute) + frozen_bytes(unit, precision);
}

/// What stays of units between forward and backward where they are sharded over fewer axes than at rest.
std::uint64_t secondary_parts(const Strategy& strategy, const MeshShape& mesh, std::span<const UnitSize> units,
                              Precision precision) {
  const int after_forward = parts(strategy.param_after_forward, mesh);
  if (after_forward == 1 || after_forward == parts(strategy.param_at_rest, mesh)) return 0;
  std::uint64_t bytes = 0;
  for (const UnitSize& unit : units)
    if (!unit.kept_after_forward) bytes += parameter_bytes(unit, precision) / static_cast<std::uint64_t>(after_forward);
  return bytes;
}

/// Bytes of the root, and of the other units in forward order.
struct Sizes {
  std::uint64_t root = 0;
  std::vector<std::uint64_t> inner;

  /// The most of so many neighbours.
  std::uint64_t window(std::size_t width) const {
    std::uint64_t most = 0;
    for (std::size_t i = 0; i < inner.size(); ++i) {
      std::uint64_t sum = 0;
      for (std::size_t j = i; j < std::min(i + width, inner.size()); ++j) sum += inner[j];
      most = std::max(most, sum);
    }
    return most;
  }
};

template <class BytesOf>
Sizes sizes_of(std::span<const UnitSize> units, BytesOf&& bytes_of) {
  Sizes sizes;
  for (const UnitSize& unit : units) {
    const std::uint64_t bytes = bytes_of(unit);
    if (unit.is_root) {
      sizes.root += bytes;
    } else {
      sizes.inner.push_back(bytes);
    }
  }
  return sizes;
}

}  // namespace

std::vector<UnitSize> planned_units(nn::Module& model, std::string_view wrap, const Strategy& strategy,
                                    const MeshShape& mesh, std::optional<bool> reshard_after_forward) {
  const std::vector<UnitSpec> specs = make_units(model, wrap);
  const bool sharded = parts(strategy.param_after_forward, mesh) > 1;
  std::vector<UnitSize> sizes;
  for (const UnitSpec& spec : specs) {
    UnitSize& size = sizes.emplace_back();
    size.is_root = spec.is_root;
    size.kept_after_forward =
        keeps_after_forward(sharded, spec.is_root, sizes.size() == specs.size(), reshard_after_forward);
    for (const FlatLayout& layout : make_layouts(spec.parameters, mesh.size())) {
      size.padded += layout.padded;
      if (!layout.trainable) size.frozen += layout.padded;
      if (layout.dtype == DType::u8) size.bytes += layout.padded;
    }
    for (const auto& parameter : spec.parameters)
      if (parameter->tensor().requires_grad()) size.shapes.push_back(parameter->shape());
  }
  return sizes;
}

CommunicationFormula communication_formula(const Strategy& strategy, const MeshShape& mesh,
                                           std::span<const UnitSize> units, Precision precision, StepCourse course,
                                           const CollectiveRegistry& collectives) {
  Costs costs(strategy, mesh, precision, course, collectives);
  for (const UnitSize& unit : units) {
    costs.add_reductions(unit);
    costs.add_gathers(unit, {unit.trained(), precision.compute, true});
    costs.add_gathers(unit, {unit.frozen - unit.bytes, precision.compute});
    costs.add_gathers(unit, {unit.bytes, DType::u8});
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
  const auto cut = [&](const Axes& axes, DType dtype) {
    return static_cast<std::uint64_t>(padded) * size_of(dtype) / static_cast<std::uint64_t>(parts(axes, mesh));
  };
  int values = slots + (precision.masters() ? 1 : 0);
  if (const Axis axis = periodic_axis(strategy); !axis.empty())  // where replicas met, and the outer momentum
    values += strategy.sync.at(axis).outer.momentum > 0 ? 2 : 1;
  return {cut(strategy.param_at_rest, precision.compute), cut(strategy.gradient, precision.reduce),
          cut(strategy.optimizer, DType::f32) * static_cast<std::uint64_t>(values)};
}

ModelStateBytes model_state_formula(const Strategy& strategy, const MeshShape& mesh, std::span<const UnitSize> units,
                                    int slots, Precision precision) {
  std::int64_t trained = 0;
  std::uint64_t frozen = 0;
  for (const UnitSize& unit : units) trained += unit.trained(), frozen += frozen_bytes(unit, precision);
  ModelStateBytes state = model_state_formula(strategy, mesh, trained, slots, precision);
  state.parameter += frozen / static_cast<std::uint64_t>(parts(strategy.param_at_rest, mesh));
  return state;
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
  for (const UnitSize& unit : units) {
    const ModelStateBytes state = model_state_formula(strategy, mesh, unit.trained(), slots, precision);
    const std::uint64_t frozen =
        frozen_bytes(unit, precision) / static_cast<std::uint64_t>(parts(strategy.param_at_rest, mesh));
    if (!strategy.param_at_rest.empty()) {
      total.to_device += (state.parameter + frozen) * (unit.kept_after_forward ? 1 : 2);  // for each gather
      if (!precision.masters()) total.to_device += state.parameter;                       // for the update
      total.to_host += state.parameter;
    }
    if (!strategy.gradient.empty()) {
      total.to_device += state.gradient;
      total.to_host += state.gradient;
    }
    total.to_device += state.optimizer;
    total.to_host += state.optimizer;
  }
  return total;
}

PeakBounds peak_formula(const Strategy& strategy, const MeshShape& mesh, std::span<const UnitSize> units,
                        StepCourse course, Precision precision) {
  const std::uint64_t element = size_of(precision.compute);
  const Sizes parameters = sizes_of(units, [&](const UnitSize& unit) { return parameter_bytes(unit, precision); });
  const Sizes gradients =
      sizes_of(units, [&](const UnitSize& unit) { return static_cast<std::uint64_t>(unit.trained()) * element; });
  const std::uint64_t root = gradients.root;
  const std::vector<std::uint64_t>& inner = gradients.inner;
  const bool keeps_all =
      std::all_of(units.begin(), units.end(), [](const UnitSize& u) { return u.kept_after_forward; }) ||
      (course.microbatches > 1 && !course.reshard_after_backward);
  PeakBounds bounds;
  if (parts(strategy.param_at_rest, mesh) > 1)
    bounds.unsharded_parameter =
        secondary_parts(strategy, mesh, units, precision) + parameters.root +
        parameters.window(keeps_all ? inner.size() : static_cast<std::size_t>(course.prefetch) + 1);
  if (holds_gradients(strategy, mesh, course)) {
    bounds.unsharded_gradient = held_gradients(units, parts(strategy.gradient, mesh) > 1, precision);
    return bounds;
  }
  // What is kept of earlier microbatches' gradients is no place for the next one's.
  const bool sharded = parts(strategy.gradient, mesh) > 1 || (course.microbatches > 1 && mesh.size() > 1);
  const std::size_t behind = units_behind(strategy, mesh, course);
  if (!precision.casts()) {
    if (sharded) bounds.unsharded_gradient = root + gradients.window(1 + behind);
    return bounds;
  }
  // A unit has both forms while it is cast; where the wide one is leased too, those before it are still reduced.
  const std::uint64_t wide = sharded ? size_of(precision.reduce) / element : 0;
  const std::uint64_t largest = gradients.window(1);
  bounds.unsharded_gradient = std::max(root + (1 + wide) * largest, (1 + wide) * root);
  for (std::size_t i = 0; i < inner.size(); ++i) {
    std::uint64_t before = 0;
    for (std::size_t j = i + 1; j <= std::min(i + behind, inner.size() - 1); ++j) before += wide * inner[j];
    bounds.unsharded_gradient = std::max(bounds.unsharded_gradient, root + (1 + wide) * inner[i] + before);
  }
  std::uint64_t before = 0;
  for (std::size_t j = 0; j < std::min(behind, inner.size()); ++j) before += wide * inner[j];
  bounds.unsharded_gradient = std::max(bounds.unsharded_gradient, (1 + wide) * root + before);
  return bounds;
}

}  // namespace tessera::fsdp
