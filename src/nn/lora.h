// LoRA (E. Hu et al., arXiv 2106.09685): a frozen model with trained low-rank adapters, y = x W + alpha / rank (x A) B,
// with the names, shapes and initial values of Hugging Face's PEFT.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/nn/init.h"
#include "tessera/nn/models/config.h"
#include "tessera/nn/module.h"

namespace tessera::nn {

struct LoraOptions {
  std::int64_t rank = 8;
  double alpha = 8;
  /// The last parts of the paths of linear layers: "c_attn", "mlp.c_fc". Empty: default_lora_targets().
  std::vector<std::string> targets;
  double factor() const { return alpha / static_cast<double>(rank); }
  bool operator==(const LoraOptions&) const = default;
};

/// Attention's fused projection for gpt2; q_proj and v_proj for llama: PEFT's.
TESSERA_API std::vector<std::string> default_lora_targets(const ModelConfig& config);

/// Freezes all parameters and adds an adapter to each linear layer that a target names. Before set_dtype() and before
/// an engine has the model. Returns how many there are. Throws InvalidUsage where a target names no linear layer, or
/// rank or alpha is not above 0.
TESSERA_API int add_lora(Module& model, const LoraOptions& options);

/// QLoRA: keeps the weights of all linear layers in NF4 (Linear::quantize()). Returns how many there are.
TESSERA_API int quantize_nf4(Module& model);

/// Whether a parameter of this name belongs to an adapter.
TESSERA_API bool is_adapter(std::string_view name);

/// W + alpha / rank B A in f32, for any ranges of the weights; the adapters come first. The sum over the rank is in
/// order, so any cut of a weight gives the same bits.
class TESSERA_API LoraMerger {
 public:
  LoraMerger(const ModelConfig& config, const LoraOptions& options);
  /// A whole factor: a parameter with is_adapter(name).
  void add(std::string_view name, const Shape& shape, const float* values);
  /// Adds the layer's product to elements `range` of the weight `name`; others are left as they are.
  void merge(std::string_view name, ElementRange range, float* values) const;

 private:
  struct Factor {
    Shape shape;
    std::vector<float> values;
  };
  const bool in_out_;  // how the weights lie
  const float factor_;
  std::map<std::string, Factor, std::less<>> factors_;  // by name
};

}  // namespace tessera::nn
