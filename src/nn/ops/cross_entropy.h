// Fused softmax and cross-entropy.
#pragma once

#include "tessera/nn/kernels/cross_entropy.h"
#include "tessera/nn/tensor.h"

namespace tessera::nn::ops {

using kernels::kIgnoreIndex;

/// Settings of cross_entropy().
struct CrossEntropyOptions {
  std::int32_t ignore_index = kIgnoreIndex;  ///< targets of this value are not valid ones
  /// The backward overwrites the logits with their gradient, so only one such buffer exists. Nothing else may read them
  /// then.
  bool overwrite_logits = false;
  std::int64_t vocabulary = 0;  ///< classes: the first elements of each row of logits (padded_linear()); 0: all
};

/// Returns the mean over the valid targets of -log softmax(logits[row])[target]: an f64 scalar, the sum divided by the
/// count (0 if every target is ignored). logits[..., vocabulary], targets[...] i32. Saves the logits and two numbers
/// per row.
TESSERA_API Tensor cross_entropy(const Tensor& logits, const Tensor& targets, CrossEntropyOptions options = {});

}  // namespace tessera::nn::ops
