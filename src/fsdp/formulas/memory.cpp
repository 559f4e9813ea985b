// Memory of a step, and its transfers between device and host.
#include <algorithm>
#include <numeric>
#include <utility>

#include "tessera/fsdp/formulas/flat_parts.h"

namespace tessera::fsdp {

namespace {

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
