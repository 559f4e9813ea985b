// Which element types a training computes and reduces in.
#pragma once

#include <optional>

#include "tessera/base/dtype.h"
#include "tessera/fsdp/types.h"

namespace tessera::fsdp {

/// `compute`: of parameters, gathered and at rest, and of the gradients that a backward writes. `reduce`: of gradients
/// while they are reduced, and of what is kept of them.
struct Precision {
  DType compute = DType::f32;
  DType reduce = DType::f32;

  /// Gradients are converted before their reduction.
  bool casts() const { return compute != reduce; }
  /// The optimizer keeps f32 values of its own.
  bool has_master_weights() const { return compute != DType::f32; }
  bool operator==(const Precision&) const = default;
};

/// Reduces in `reduce`, or where there is nothing in what it computes in. Throws Unsupported for what the engine can't
/// do: it computes in f32, bf16 or f16, and reduces in that or in f32.
TESSERA_API Precision make_precision(DType compute, std::optional<DType> reduce);

}  // namespace tessera::fsdp
