#include "tessera/fsdp/formulas.h"

#include <algorithm>
#include <utility>

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

/// How often a step gathers a unit that is sharded at rest.
std::uint64_t gathers_of(const UnitSize& unit, StepCourse course) {
  const auto microbatches = static_cast<std::uint64_t>(course.microbatches);
  const std::uint64_t forwards = course.reshard_after_backward ? microbatches : 1;
  return forwards + (unit.kept_after_forward ? 0 : microbatches);
}

/// Costs of one strategy's collectives, summed over units.
class Costs {
 public:
  Costs(const Strategy& strategy, const MeshShape& mesh, Precision precision, StepCourse course,
        const CollectiveRegistry& registry)
      : strategy_(strategy), mesh_(mesh), precision_(precision), course_(course), registry_(registry) {}

  /// Gradients of one flat parameter: scattered where the optimizer is sharded, then all-reduced over the other axes.
  void add_reductions(const UnitSize& unit) {
    auto elements = static_cast<std::uint64_t>(unit.padded);
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

  void add_gathers(const UnitSize& unit) {
    auto elements = static_cast<std::uint64_t>(unit.padded);  // less where outer axes have already cut it
    for (const MeshAxis& axis : mesh_.axes) {
      if (axis.size == 1 || !strategy_.optimizer.contains(axis.name)) continue;
      const bool at_rest = strategy_.param_at_rest.contains(axis.name);
      add(OpKind::all_gather, strategy_.all_gather, {elements, precision_.compute, axis.size, unit.shapes},
          at_rest ? gathers_of(unit, course_) : 1);
      if (!at_rest) elements /= static_cast<std::uint64_t>(axis.size);
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
    const auto elements = static_cast<std::uint64_t>(unit.padded);
    all += elements;
    (unit.is_root ? root : largest) = std::max(unit.is_root ? root : largest, elements);
  }
  const std::uint64_t compute = size_of(precision.compute), reduce = size_of(precision.reduce);
  const std::uint64_t held = leased ? all * reduce : 0;
  if (!precision.casts()) return held;
  return held + root * compute + std::max(largest * (compute + reduce), root * reduce);
}

}  // namespace

CommunicationFormula communication_formula(const Strategy& strategy, const MeshShape& mesh,
                                           std::span<const UnitSize> units, Precision precision, StepCourse course,
                                           const CollectiveRegistry& collectives) {
  Costs costs(strategy, mesh, precision, course, collectives);
  for (const UnitSize& unit : units) {
    costs.add_reductions(unit);
    costs.add_gathers(unit);
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
    const ModelStateBytes state = model_state_formula(strategy, mesh, unit.padded, slots, precision);
    if (!strategy.param_at_rest.empty()) {
      total.to_device += state.parameter * (unit.kept_after_forward ? 1 : 2);  // for each gather
      if (!precision.masters()) total.to_device += state.parameter;            // for the update
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
  std::uint64_t root = 0;
  std::vector<std::uint64_t> inner;
  for (const UnitSize& unit : units) {
    const std::uint64_t bytes = static_cast<std::uint64_t>(unit.padded) * element;
    if (unit.is_root) {
      root += bytes;
    } else {
      inner.push_back(bytes);
    }
  }
  const auto window = [&](std::size_t width) {
    std::uint64_t most = 0;
    for (std::size_t i = 0; i < inner.size(); ++i) {
      std::uint64_t sum = 0;
      for (std::size_t j = i; j < std::min(i + width, inner.size()); ++j) sum += inner[j];
      most = std::max(most, sum);
    }
    return most;
  };
  const bool keeps_all =
      std::all_of(units.begin(), units.end(), [](const UnitSize& u) { return u.kept_after_forward; }) ||
      (course.microbatches > 1 && !course.reshard_after_backward);
  PeakBounds bounds;
  if (parts(strategy.param_at_rest, mesh) > 1)
    bounds.unsharded_parameter =
        root + window(keeps_all ? inner.size() : static_cast<std::size_t>(course.prefetch) + 1);
  if (holds_gradients(strategy, mesh, course)) {
    bounds.unsharded_gradient = held_gradients(units, parts(strategy.gradient, mesh) > 1, precision);
    return bounds;
  }
  // What is kept of earlier microbatches' gradients is no place for the next one's.
  const bool sharded = parts(strategy.gradient, mesh) > 1 || (course.microbatches > 1 && mesh.size() > 1);
  const std::size_t behind = units_behind(strategy, mesh, course);
  if (!precision.casts()) {
    if (sharded) bounds.unsharded_gradient = root + window(1 + behind);
    return bounds;
  }
  // A unit has both forms while it is cast; where the wide one is leased too, those before it are still reduced.
  const std::uint64_t wide = sharded ? size_of(precision.reduce) / element : 0;
  const std::uint64_t largest = window(1);
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
