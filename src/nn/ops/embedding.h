// Token and position embeddings.
#pragma once

#include "tessera/nn/tensor.h"

namespace tessera::nn::ops {

/// y[..., width] = weight[ids[...], :]; ids are i32. An id outside the table throws InvalidUsage (when the work runs).
TESSERA_API Tensor embedding(const Tensor& ids, const Tensor& weight);

/// y[batch, position, width] = tokens[ids[batch, position], :] + positions[position, :]
TESSERA_API Tensor embedding(const Tensor& ids, const Tensor& tokens, const Tensor& positions);

/// Returns 0, 1, .., positions - 1 for every sequence of ids[batch, position].
TESSERA_API Tensor positions_of(const Tensor& ids);

}  // namespace tessera::nn::ops
