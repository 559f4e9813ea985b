// Dropout as a module: its path is part of its masks' key.
#pragma once

#include "tessera/nn/module.h"
#include "tessera/nn/ops/dropout.h"

namespace tessera::nn {

/// Sets elements to zero with a given probability in training and scales the others; the identity in evaluation.
class TESSERA_API Dropout : public Layer<Dropout> {
 public:
  /// The first call throws InvalidUsage if `probability` is outside [0, 1).
  Dropout(Context& context, double probability) : Layer(context), probability_(probability) {}
  /// X: [sequence, ...]; the result has the same shape.
  Tensor forward(const Tensor& x) { return ops::dropout(x, probability_, path()); }

 private:
  const double probability_;
};

}  // namespace tessera::nn
