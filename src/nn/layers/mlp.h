// Feed-forward layers in the variants of GPT-2 and Llama.
#pragma once

#include "tessera/nn/layers/dropout.h"
#include "tessera/nn/layers/linear.h"
#include "tessera/nn/ops/activation.h"

namespace tessera::nn {

/// Settings of Mlp.
struct MlpOptions {
  std::int64_t width = 0;                                   ///< width of x and the result
  std::int64_t hidden = 0;                                  ///< elements between c_fc and c_proj
  ops::Activation activation = ops::Activation::gelu_tanh;  ///< f
  double deviation = 0.02;                                  ///< deviation of c_fc's initial weights
  double projection_deviation = 0.02;                       ///< deviation of c_proj
  double residual_dropout = 0.0;                            ///< probability for the output
};

/// c_proj(f(c_fc(x))). Children: c_fc ([width, hidden]), c_proj ([hidden, width]), and a dropout.
class TESSERA_API Mlp : public Layer<Mlp> {
 public:
  /// Parameters get no memory; see Module::materialize().
  Mlp(Context& context, const MlpOptions& options);
  Tensor forward(const Tensor& x);  ///< x and result: [..., width]

 private:
  const ops::Activation activation_;
  Linear& c_fc_;
  Linear& c_proj_;
  Dropout& dropout_;
};

/// Settings of GatedMlp.
struct GatedMlpOptions {
  std::int64_t width = 0;   ///< width of x and the result
  std::int64_t hidden = 0;  ///< elements between the projections
  double deviation = 0.02;  ///< deviation of the initial weights
  bool bias = false;        ///< true: all projections have one
};

/// SwiGLU: down_proj(silu(gate_proj(x)) * up_proj(x)).
class TESSERA_API GatedMlp : public Layer<GatedMlp> {
 public:
  /// Parameters get no memory; see Module::materialize().
  GatedMlp(Context& context, const GatedMlpOptions& options);
  Tensor forward(const Tensor& x);  ///< x and result: [..., width]

 private:
  Linear& gate_proj_;
  Linear& up_proj_;
  Linear& down_proj_;
};

}  // namespace tessera::nn
