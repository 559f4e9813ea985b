#include "tessera/nn/layers/linear.h"

namespace tessera::nn {
namespace {

Shape weight_shape(const LinearOptions& options) {
  if (options.in < 1 || options.out < 1)
    throw InvalidUsage("linear: " + std::to_string(options.in) + " inputs and " + std::to_string(options.out) +
                       " outputs; both must be 1 or more");
  if (options.layout == ops::WeightLayout::in_out) return {options.in, options.out};
  return {options.out, options.in};
}

}  // namespace

Linear::Linear(Context& context, const LinearOptions& options)
    : Layer(context),
      layout_(options.layout),
      weight_(add_parameter("weight", weight_shape(options), Init::normal(options.deviation))),
      bias_(options.bias ? &add_parameter("bias", {options.out}, Init::zeros()) : nullptr) {}

Tensor Linear::forward(const Tensor& x) { return ops::linear(x, weight_.tensor(), bias(), layout_); }

Tensor Linear::forward(const Tensor& x, ops::Activation then) {
  return ops::activated_linear(then, x, weight_.tensor(), bias(), layout_);
}

}  // namespace tessera::nn
