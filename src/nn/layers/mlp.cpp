#include "tessera/nn/layers/mlp.h"

namespace tessera::nn {

Mlp::Mlp(Context& context, const MlpOptions& options)
    : Layer(context),
      activation_(options.activation),
      c_fc_(add<Linear>("c_fc", conv1d(options.width, options.hidden, options.deviation))),
      c_proj_(add<Linear>("c_proj", conv1d(options.hidden, options.width, options.projection_deviation))),
      dropout_(add<Dropout>("dropout", options.residual_dropout)) {}

Tensor Mlp::forward(const Tensor& x) { return dropout_(c_proj_(c_fc_(x, activation_))); }

GatedMlp::GatedMlp(Context& context, const GatedMlpOptions& options)
    : Layer(context),
      gate_proj_(add<Linear>(
          "gate_proj",
          LinearOptions{
              .in = options.width, .out = options.hidden, .bias = options.bias, .deviation = options.deviation})),
      up_proj_(add<Linear>(
          "up_proj",
          LinearOptions{
              .in = options.width, .out = options.hidden, .bias = options.bias, .deviation = options.deviation})),
      down_proj_(add<Linear>(
          "down_proj",
          LinearOptions{
              .in = options.hidden, .out = options.width, .bias = options.bias, .deviation = options.deviation})) {}

Tensor GatedMlp::forward(const Tensor& x) {
  // Arguments of one call are evaluated in an order of the compiler's, which would be that of the gradients' sum.
  const Tensor gate = gate_proj_(x);
  const Tensor up = up_proj_(x);
  return down_proj_(ops::swiglu(gate, up));
}

}  // namespace tessera::nn
