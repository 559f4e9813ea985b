// Rotary position embedding, in the convention of Hugging Face's Llama (element i is paired with i + dim/2).
#pragma once

#include "tessera/nn/kernels/rope.h"
#include "tessera/nn/tensor.h"

namespace tessera::nn::ops {

/// Cosines and sines of position * theta^(-2i/dim), [positions, dim/2] each.
struct RopeTable {
  Tensor cosine,                                            ///< [positions, dim/2]
      sine;                                                 ///< [positions, dim/2]
  std::int64_t positions() const { return cosine.dim(0); }  ///< length of the longest sequence
  std::int64_t dim() const { return 2 * cosine.dim(1); }    ///< elements of one head
};

/// Arguments of make_rope_table().
struct RopeSettings {
  std::int64_t positions = 0;         ///< length of the longest sequence
  std::int64_t dim = 0;               ///< elements of one head; even, else InvalidUsage
  double theta = 10000.0;             ///< base of the angles
  kernels::RopeScaling scaling = {};  ///< scaling of the angles
};

/// The table's memory is tracked under category `other`.
TESSERA_API RopeTable make_rope_table(Context& context, const RopeSettings& settings, DType dtype = DType::f32);

/// Rotates x[batch, position, heads * dim] IN PLACE: the result shares x's memory, so nothing else may read x
/// afterwards (it is meant for the output of a linear layer, which no backward saves). The gradient is rotated back in
/// place, too.
TESSERA_API Tensor rope(const Tensor& x, const RopeTable& table, std::int64_t heads);

}  // namespace tessera::nn::ops
