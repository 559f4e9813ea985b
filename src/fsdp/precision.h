// The element types in which training computes and reduces.
#pragma once

#include <optional>

#include "tessera/base/dtype.h"
#include "tessera/fsdp/types.h"

namespace tessera::fsdp {

/// `compute`: dtype of parameters, unsharded and at rest, and of the gradients that a backward writes. `reduce`: dtype
/// of gradients while they are reduced, and of the gradients that are kept.
struct Precision {
  DType compute = DType::f32;  ///< f32, bf16 or f16
  DType reduce = DType::f32;   ///< dtype of reductions: that of `compute`, or f32

  /// Whether gradients are converted before their reduction.
  bool casts() const { return compute != reduce; }
  /// Whether the optimizer keeps f32 master weights.
  bool has_master_weights() const { return compute != DType::f32; }
  bool operator==(const Precision&) const = default;  ///< compares all members
};

/// The precision that reduces in `reduce`, or in `compute` if `reduce` is empty. Throws Unsupported for other
/// combinations: the engine computes in f32, bf16 or f16, and reduces in that dtype or in f32.
TESSERA_API Precision make_precision(DType compute, std::optional<DType> reduce);

}  // namespace tessera::fsdp
