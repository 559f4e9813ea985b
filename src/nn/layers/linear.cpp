#include "tessera/nn/layers/linear.h"

#include <cmath>

#include "tessera/nn/ops/arithmetic.h"

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
      bias_(options.bias ? &add_parameter("bias", {options.out}, Init::zeros()) : nullptr),
      in_(options.in),
      out_(options.out) {}

void Linear::add_adapter(std::int64_t rank, double factor) {
  if (lora_a_ != nullptr) throw InvalidUsage("adapter: " + path() + " has one already");
  if (rank < 1) throw InvalidUsage("adapter: rank " + std::to_string(rank) + "; 1 or more");
  lora_a_ = &add<AdapterFactor>("lora_A", Shape{rank, in_}, Init::uniform(1.0 / std::sqrt(static_cast<double>(in_))));
  lora_b_ = &add<AdapterFactor>("lora_B", Shape{out_, rank}, Init::zeros());
  factor_ = factor;
}

Tensor Linear::adapted(const Tensor& x, const Tensor& y) {
  return ops::add(y, ops::scale((*lora_b_)((*lora_a_)(x)), factor_));
}

Tensor Linear::forward(const Tensor& x) {
  const Tensor y = ops::linear(x, weight_.tensor(), bias(), layout_);
  return lora_a_ != nullptr ? adapted(x, y) : y;
}

Tensor Linear::forward(const Tensor& x, ops::Activation then) {
  if (lora_a_ != nullptr) return ops::activation(then, forward(x));
  return ops::activated_linear(then, x, weight_.tensor(), bias(), layout_);
}

}  // namespace tessera::nn
