// Softmax and cross-entropy, fused.
#pragma once

#include "tessera/nn/kernels/cross_entropy.h"
#include "tessera/nn/tensor.h"

namespace tessera::nn::ops {

using kernels::kIgnoreIndex;

struct CrossEntropyOptions {
  std::int32_t ignore_index = kIgnoreIndex;
  /// The backward writes the gradient over the logits, so that one such buffer lives. Nothing else may read them then.
  bool overwrite_logits = false;
};

/// The mean over the valid targets of -log softmax(logits[row])[target]: an f64 scalar, the sum divided by the count (0
/// where every target is ignored). logits[..., vocabulary], targets[...] i32. Saves the logits and two numbers per row.
TESSERA_API Tensor cross_entropy(const Tensor& logits, const Tensor& targets, CrossEntropyOptions options = {});

}  // namespace tessera::nn::ops
