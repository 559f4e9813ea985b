// Feed-forward layers in the variants of GPT-2 and Llama.
#pragma once

#include "tessera/nn/layers/dropout.h"
#include "tessera/nn/layers/linear.h"
#include "tessera/nn/ops/activation.h"

namespace tessera::nn {

struct MlpOptions {
  std::int64_t width = 0;
  std::int64_t hidden = 0;
  ops::Activation activation = ops::Activation::gelu_tanh;
  double deviation = 0.02;
  double projection_deviation = 0.02;  ///< of c_proj
  double residual_dropout = 0.0;
};

/// c_proj(f(c_fc(x))). Children: c_fc ([width, hidden]), c_proj ([hidden, width]), and a dropout.
class TESSERA_API Mlp : public Layer<Mlp> {
 public:
  Mlp(Context& context, const MlpOptions& options);
  Tensor forward(const Tensor& x);

 private:
  const ops::Activation activation_;
  Linear& c_fc_;
  Linear& c_proj_;
  Dropout& dropout_;
};

struct GatedMlpOptions {
  std::int64_t width = 0;
  std::int64_t hidden = 0;
  double deviation = 0.02;
};

/// SwiGLU: down_proj(silu(gate_proj(x)) * up_proj(x)), without biases.
class TESSERA_API GatedMlp : public Layer<GatedMlp> {
 public:
  GatedMlp(Context& context, const GatedMlpOptions& options);
  Tensor forward(const Tensor& x);

 private:
  Linear& gate_proj_;
  Linear& up_proj_;
  Linear& down_proj_;
};

}  // namespace tessera::nn
