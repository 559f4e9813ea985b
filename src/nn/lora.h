// LoRA (E. Hu et al., arXiv 2106.09685): a frozen model with trained low-rank adapters, y = x W + alpha / rank (x A) B,
// with the names, shapes and initial values of Hugging Face's PEFT.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/nn/init.h"
#include "tessera/nn/models/config.h"
#include "tessera/nn/module.h"

namespace tessera::nn {

/// The largest rank that adapters of options and files can have.
inline constexpr std::int64_t kMaxLoraRank = std::int64_t{1} << 20;

/// The shape of the adapters.
struct LoraOptions {
  std::int64_t rank = 8;  ///< columns of A; at most kMaxLoraRank
  double alpha = 8;       ///< scale of the adapters; see factor()
  /// Path suffixes of linear layers: "c_attn", "mlp.c_fc". Empty: default_lora_targets().
  std::vector<std::string> targets;
  bool rank_stabilized = false;  ///< rsLoRA: divides by the root of the rank
  /// Factor of an adapter's product.
  double factor() const {
    const auto r = static_cast<double>(rank);
    return alpha / (rank_stabilized ? std::sqrt(r) : r);
  }
  bool operator==(const LoraOptions&) const = default;  ///< compares all members
};

/// PEFT's defaults: attention's fused projection for gpt2; q_proj and v_proj for llama.
TESSERA_API std::vector<std::string> default_lora_targets(const ModelConfig& config);

/// Freezes all parameters and adds an adapter to each linear layer that a target names. Call it before set_dtype() and
/// before an engine uses the model. Returns the number of adapters. Throws InvalidUsage if a target names no linear
/// layer, or if rank or alpha is not above 0.
TESSERA_API int add_lora(Module& model, const LoraOptions& options);

/// QLoRA: stores the weights of all linear layers in NF4 (Linear::quantize()). Returns the number of layers.
TESSERA_API int quantize_nf4(Module& model);

/// True if a parameter of this name belongs to an adapter.
TESSERA_API bool is_adapter(std::string_view name);

/// Computes W + alpha / rank B A in f32 for any ranges of the weights, once all adapters were added. The sum over the
/// rank has a fixed order, so the bits don't depend on how a weight is divided into ranges.
class TESSERA_API LoraMerger {
 public:
  /// The options with which the adapters were added.
  LoraMerger(const ModelConfig& config, const LoraOptions& options);
  /// Adds a whole factor: a parameter with is_adapter(name). Throws InvalidUsage if it is not a matrix of these values.
  void add(std::string_view name, const Shape& shape, std::span<const float> values);
  /// Adds the layer's product to elements `range` of the weight `name`; weights without an adapter stay unchanged.
  /// Throws InvalidUsage if the factors don't fit each other or the range.
  void merge(std::string_view name, ElementRange range, float* values) const;

 private:
  struct Factor {
    Shape shape;
    std::vector<float> values;
  };
  const bool in_out_;  // layout of the weights
  const float factor_;
  std::map<std::string, Factor, std::less<>> factors_;  // factors by name
};

}  // namespace tessera::nn
