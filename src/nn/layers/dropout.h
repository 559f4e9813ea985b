// Dropout as a module: its path is part of its masks' key.
#pragma once

#include "tessera/nn/module.h"
#include "tessera/nn/ops/dropout.h"

namespace tessera::nn {

class TESSERA_API Dropout : public Layer<Dropout> {
 public:
  /// The first call throws InvalidUsage if `probability` is outside [0, 1).
  Dropout(Context& context, double probability) : Layer(context), probability_(probability) {}
  Tensor forward(const Tensor& x) { return ops::dropout(x, probability_, path()); }

 private:
  const double probability_;
};

}  // namespace tessera::nn
