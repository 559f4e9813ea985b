// Normalizations over the last dimension.
#pragma once

#include "tessera/nn/module.h"

namespace tessera::nn {

/// Settings of LayerNorm and RMSNorm.
struct NormOptions {
  std::int64_t width = 0;  ///< elements of the last dimension
  double eps = 1e-5;       ///< added to the variance or mean square
};

/// Parameters: weight (ones), bias (zeros).
class TESSERA_API LayerNorm : public Layer<LayerNorm> {
 public:
  /// Parameters get no memory; see Module::materialize().
  LayerNorm(Context& context, const NormOptions& options);
  Tensor forward(const Tensor& x);  ///< ops::layer_norm()

 private:
  const double eps_;
  Parameter& weight_;
  Parameter& bias_;
};

/// Parameter: weight (ones).
class TESSERA_API RMSNorm : public Layer<RMSNorm> {
 public:
  /// The parameter gets no memory; see Module::materialize().
  RMSNorm(Context& context, const NormOptions& options);
  Tensor forward(const Tensor& x);  ///< ops::rms_norm()

 private:
  const double eps_;
  Parameter& weight_;
};

}  // namespace tessera::nn
