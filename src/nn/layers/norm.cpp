#include "tessera/nn/layers/norm.h"

#include "tessera/nn/ops/norm.h"

namespace tessera::nn {

LayerNorm::LayerNorm(Context& context, const NormOptions& options)
    : Layer(context),
      eps_(options.eps),
      weight_(add_parameter("weight", {options.width}, Init::ones())),
      bias_(add_parameter("bias", {options.width}, Init::zeros())) {}

Tensor LayerNorm::forward(const Tensor& x) { return ops::layer_norm(x, weight_.tensor(), bias_.tensor(), eps_); }

RMSNorm::RMSNorm(Context& context, const NormOptions& options)
    : Layer(context), eps_(options.eps), weight_(add_parameter("weight", {options.width}, Init::ones())) {}

Tensor RMSNorm::forward(const Tensor& x) { return ops::rms_norm(x, weight_.tensor(), eps_); }

}  // namespace tessera::nn
