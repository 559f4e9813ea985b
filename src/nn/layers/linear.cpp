#include "tessera/nn/layers/linear.h"

#include <cmath>

#include "tessera/nn/nf4.h"
#include "tessera/nn/ops/arithmetic.h"

namespace tessera::nn {
namespace {

constexpr std::string_view kFp8Amax = "fp8_amax";

Shape shape_of_weight(const LinearOptions& options) {
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
      weight_(add_parameter("weight", shape_of_weight(options), Init::normal(options.deviation))),
      bias_(options.bias ? &add_parameter("bias", {options.out}, Init::zeros()) : nullptr),
      in_(options.in),
      out_(options.out),
      weight_shape_(weight_.shape()) {}

void Linear::quantize() {
  if (quantized_) throw InvalidUsage("quantize: " + path() + " is already quantized");
  quantize_parameter(weight_, static_cast<std::int64_t>(nf4_bytes(count_of(weight_shape_))));
  quantized_ = true;
}

void Linear::use_fp8(Fp8Scaling scaling) {
  if (quantized_) throw InvalidUsage("fp8: the weight of " + path() + " is in NF4; use one of the two");
  if (fp8_) throw InvalidUsage("fp8: " + path() + " already uses it");
  for (const std::int64_t extent : {in_, out_})
    if (extent % static_cast<std::int64_t>(kFp8Multiple) != 0)
      throw InvalidUsage("fp8: " + path() + " has " + std::to_string(in_) + " inputs and " + std::to_string(out_) +
                         " outputs; both must be multiples of " + std::to_string(kFp8Multiple));
  if (const std::string reason = context().device_kernels().fp8_reason(); !reason.empty()) throw Unsupported(reason);
  fp8_ = scaling;
  if (scaling == Fp8Scaling::delayed)
    fp8_amax_ = &add_buffer(std::string(kFp8Amax), {3, static_cast<std::int64_t>(1 + kFp8History)});
}

Tensor Linear::product(const Tensor& x) const {
  if (fp8_) {
    const ops::Fp8Recipe recipe{*fp8_, fp8_amax_ != nullptr ? fp8_amax_->tensor() : Tensor(), updates_buffers()};
    return ops::fp8_linear(x, weight_.tensor(), bias(), layout_, recipe);
  }
  if (quantized_) return ops::linear(x, ops::Nf4Weight{weight_.tensor(), weight_shape_, layout_}, bias());
  return ops::linear(x, weight_.tensor(), bias(), layout_);
}

void Linear::add_adapter(std::int64_t rank, double factor) {
  if (lora_a_ != nullptr) throw InvalidUsage("adapter: " + path() + " already has one");
  if (rank < 1) throw InvalidUsage("adapter: rank " + std::to_string(rank) + ", needs 1 or more");
  lora_a_ = &add<LoraFactor>("lora_A", Shape{rank, in_}, Init::uniform(1.0 / std::sqrt(static_cast<double>(in_))));
  lora_b_ = &add<LoraFactor>("lora_B", Shape{out_, rank}, Init::zeros());
  factor_ = factor;
}

Tensor Linear::adapted(const Tensor& x, const Tensor& y) {
  return ops::add(y, ops::scale((*lora_b_)((*lora_a_)(x)), factor_));
}

Tensor Linear::forward(const Tensor& x) {
  const Tensor y = product(x);
  return lora_a_ != nullptr ? adapted(x, y) : y;
}

Tensor Linear::forward(const Tensor& x, ops::Activation then) {
  if (lora_a_ != nullptr || quantized_ || fp8_) return ops::activation(then, forward(x));
  return ops::activated_linear(then, x, weight_.tensor(), bias(), layout_);
}

bool is_fp8_state(std::string_view name) { return name == kFp8Amax || name.ends_with("." + std::string(kFp8Amax)); }

int use_fp8(Module& model, Fp8Scaling scaling) {
  int layers = 0;
  for (Module* module : model.modules()) {
    auto* const linear = dynamic_cast<Linear*>(module);
    if (linear == nullptr || linear->quantized() || linear->dtype() == DType::f32) continue;
    linear->use_fp8(scaling);
    ++layers;
  }
  return layers;
}

}  // namespace tessera::nn
