// Linear layers.
#pragma once

#include "tessera/nn/module.h"
#include "tessera/nn/ops/linear.h"

namespace tessera::nn {

struct LinearOptions {
  std::int64_t in = 0;
  std::int64_t out = 0;
  bool bias = true;
  ops::WeightLayout layout = ops::WeightLayout::out_in;  ///< in_out: GPT-2's Conv1D
  double deviation = 0.02;                               ///< of the normal initial weights; biases begin at zero
};

/// y[..., out] = x[..., in] * W + b. Parameters: weight, bias.
class TESSERA_API Linear : public Layer<Linear> {
 public:
  Linear(Context& context, const LinearOptions& options);
  Tensor forward(const Tensor& x);
  Tensor forward(const Tensor& x, ops::Activation then);  ///< activation(then, y)
  const Parameter& weight() const { return weight_; }

 private:
  Tensor bias() const { return bias_ != nullptr ? bias_->tensor() : Tensor(); }

  const ops::WeightLayout layout_;
  Parameter& weight_;
  Parameter* const bias_;
};

/// The options of Hugging Face GPT-2's layer, whose weight is [in, out].
inline LinearOptions conv1d(std::int64_t in, std::int64_t out, double deviation = 0.02) {
  return {in, out, true, ops::WeightLayout::in_out, deviation};
}

}  // namespace tessera::nn
