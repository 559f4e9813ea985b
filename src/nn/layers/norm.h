// Normalizations over the last dimension.
#pragma once

#include "tessera/nn/module.h"
#include "tessera/nn/ops/norm.h"

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
  /// A call of the module with x + added: ops::add_layer_norm() between the hooks, or two operations if the module has
  /// its own dtype or is checkpointed.
  ops::SummedNorm of_sum(const Tensor& x, const Tensor& added);

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
  /// The same as LayerNorm::of_sum(), with ops::add_rms_norm().
  ops::SummedNorm of_sum(const Tensor& x, const Tensor& added);

 private:
  const double eps_;
  Parameter& weight_;
};

}  // namespace tessera::nn
