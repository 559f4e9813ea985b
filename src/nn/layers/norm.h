// Normalizations over the last dimension.
#pragma once

#include "tessera/nn/module.h"

namespace tessera::nn {

struct NormOptions {
  std::int64_t width = 0;
  double eps = 1e-5;
};

/// Parameters: weight (ones), bias (zeros).
class TESSERA_API LayerNorm : public Layer<LayerNorm> {
 public:
  LayerNorm(Context& context, const NormOptions& options);
  Tensor forward(const Tensor& x);

 private:
  const double eps_;
  Parameter& weight_;
  Parameter& bias_;
};

/// Parameter: weight (ones).
class TESSERA_API RMSNorm : public Layer<RMSNorm> {
 public:
  RMSNorm(Context& context, const NormOptions& options);
  Tensor forward(const Tensor& x);

 private:
  const double eps_;
  Parameter& weight_;
};

}  // namespace tessera::nn
