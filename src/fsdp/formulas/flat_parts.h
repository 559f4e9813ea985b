// The terms of the formulas: flat parameters.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/fsdp/formulas.h"

namespace tessera::fsdp {

/// A flat parameter, and whether a step updates it.
struct Part {
  std::int64_t elements = 0;
  Precision precision;
  bool trained = false;
  std::span<const Shape> shapes = {};

  std::uint64_t values() const { return of(precision.compute); }
  std::uint64_t of(DType dtype) const { return static_cast<std::uint64_t>(elements) * size_of(dtype); }
};

/// `precision`: of the parameters that have the model's dtype.
std::vector<Part> parts_of(const UnitSize& unit, Precision precision);

/// Number of shards over these axes.
int shard_count(const Axes& axes, const MeshShape& mesh);
/// How often a step reduces over an axis.
std::uint64_t reductions_over(const Axis& axis, const Strategy& strategy, StepShape shape);

}  // namespace tessera::fsdp
