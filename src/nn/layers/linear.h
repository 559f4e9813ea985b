// Linear layers.
#pragma once

#include "tessera/nn/module.h"
#include "tessera/nn/ops/fp8_linear.h"
#include "tessera/nn/ops/linear.h"

namespace tessera::nn {

/// Settings of Linear.
struct LinearOptions {
  std::int64_t in = 0;                                   ///< elements of x's last dimension
  std::int64_t out = 0;                                  ///< elements of y's last dimension
  bool bias = true;                                      ///< false: no parameter `bias`
  ops::WeightLayout layout = ops::WeightLayout::out_in;  ///< in_out: GPT-2's Conv1D
  double deviation = 0.02;  ///< deviation of the normal initial weights; biases start at zero
};

/// One factor of a low-rank adapter: y[..., rows] = x[..., columns] * W^T. Parameter: weight [rows, columns].
class TESSERA_API LoraFactor : public Layer<LoraFactor> {
 public:
  /// `shape`: [rows, columns]. The parameter gets no memory; see Module::materialize().
  LoraFactor(Context& context, const Shape& shape, const Init& init)
      : Layer(context), weight_(add_parameter("weight", shape, init)) {}
  Tensor forward(const Tensor& x) { return ops::linear(x, weight_.tensor()); }  ///< x[..., columns] -> [..., rows]

 private:
  Parameter& weight_;
};

/// y[..., out] = x[..., in] * W + b. Parameters: weight, bias.
class TESSERA_API Linear : public Layer<Linear> {
 public:
  /// Parameters get no memory; see Module::materialize().
  Linear(Context& context, const LinearOptions& options);
  Tensor forward(const Tensor& x);                        ///< y, with the adapter's part if there is an adapter
  Tensor forward(const Tensor& x, ops::Activation then);  ///< activation(then, y)
  const Parameter& weight() const { return weight_; }     ///< its tensor holds NF4 bytes after quantize()

  /// Adds an adapter: y += factor * (x A^T) B^T. Children: lora_A (weight [rank, in], uniform below 1 / sqrt(in), as in
  /// PEFT) and lora_B (weight [out, rank], zeros). Call it before an engine uses the model. Throws InvalidUsage for a
  /// rank below 1, and if the layer already has an adapter.
  void add_adapter(std::int64_t rank, double factor);

  /// Freezes the weight, stores it as NF4 bytes (nf4.h), and decodes it for each product. Call it before an engine uses
  /// the model and before set_dtype().
  void quantize();
  /// Computes the layer's products with operands quantized to 8-bit floating point (nn/fp8.h); weights, gradients and
  /// the adapter's products stay as they are. Delayed scaling adds a module buffer `fp8_amax`: the histories of x, the
  /// weight and y's gradient. Call it before an engine uses the model. Throws InvalidUsage for a quantized() layer and
  /// for extents that aren't multiples of kFp8Multiple, and Unsupported if the device has no such products.
  void use_fp8(Fp8Scaling scaling);

  bool quantized() const { return quantized_; }                ///< true after quantize()
  const Shape& weight_shape() const { return weight_shape_; }  ///< also if the parameter is NF4-encoded

 private:
  Tensor product(const Tensor& x) const;
  Tensor adapted(const Tensor& x, const Tensor& y);
  Tensor bias() const { return bias_ != nullptr ? bias_->tensor() : Tensor(); }

  const ops::WeightLayout layout_;
  Parameter& weight_;
  Parameter* const bias_;
  const std::int64_t in_, out_;
  const Shape weight_shape_;
  bool quantized_ = false;
  std::optional<Fp8Scaling> fp8_;
  ModuleBuffer* fp8_amax_ = nullptr;
  LoraFactor *lora_a_ = nullptr, *lora_b_ = nullptr;
  double factor_ = 0;
};

/// Calls use_fp8() on all linear layers of `model`, which its head is not, except those whose dtype is f32 and those
/// that are quantized(). Returns their number. Call it after set_dtype().
TESSERA_API int use_fp8(Module& model, Fp8Scaling scaling);

/// True for the name of a buffer of Linear::use_fp8().
TESSERA_API bool is_fp8_state(std::string_view name);

/// The options of Hugging Face GPT-2's layer, whose weight is [in, out].
inline LinearOptions conv1d(std::int64_t in, std::int64_t out, double deviation = 0.02) {
  return {in, out, true, ops::WeightLayout::in_out, deviation};
}

}  // namespace tessera::nn
