// PyTorch's reductions as the library's.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "c10d/tensors.h"
#include "tessera/comm/types.h"

namespace tessera::c10d_backend {

/// The elements and the arithmetic of a reduction. Complex numbers are pairs of real ones.
struct Reduction {
  comm::ReduceOp op;
  base::DType dtype = base::DType::f32;
  std::size_t per_element = 1;  ///< elements of `dtype` for each one of the tensor

  /// Throws PyTorch's NotImplementedError where the library has no such reduction.
  static Reduction of(const ::c10d::ReduceOp& op, at::ScalarType type);

  comm::View view(const at::Tensor& contiguous) const;
};

}  // namespace tessera::c10d_backend
