#include "tessera/nn/models/config.h"

#include <algorithm>
#include <filesystem>

#include "tessera/base/error.h"

namespace tessera::nn {
namespace {

using base::InvalidUsage;
using Family = ModelConfig::Family;

ModelConfig gpt(std::string name, std::int64_t layers, std::int64_t width, std::int64_t heads) {
  ModelConfig config;
  config.name = std::move(name);
  config.layers = layers;
  config.width = width;
  config.heads = config.kv_heads = heads;
  config.head_dim = width / heads;
  config.hidden = 4 * width;
  config.vocabulary = 256;
  config.context = 256;
  return config;
}

ModelConfig llama(std::string name, std::int64_t layers, std::int64_t width, std::int64_t heads) {
  ModelConfig config = gpt(std::move(name), layers, width, heads);
  config.family = Family::llama;
  config.activation = kernels::Activation::silu;
  config.tied = false;
  config.norm_eps = 1e-6;
  return config;
}

std::vector<ModelConfig> make_presets() {
  ModelConfig gpt_nano = gpt("gpt-nano", 2, 64, 2);
  gpt_nano.context = 64;
  ModelConfig gpt_tall = gpt("gpt-tall", 8, 64, 2);  // gpt-nano with more blocks: most of its units are freed
  gpt_tall.context = 64;
  ModelConfig gpt2 = gpt("gpt2", 12, 768, 12);
  ModelConfig gpt2_xl = gpt("gpt2-xl", 48, 1600, 25);
  for (ModelConfig* config : {&gpt2, &gpt2_xl}) {
    config->vocabulary = 50257;
    config->context = 1024;
  }
  ModelConfig llama_nano = llama("llama-nano", 2, 64, 4);
  llama_nano.kv_heads = 2;
  llama_nano.hidden = 172;
  llama_nano.context = 64;
  ModelConfig llama_7b = llama("llama-7b", 32, 4096, 32);
  llama_7b.hidden = 11008;
  llama_7b.vocabulary = 32000;
  llama_7b.context = 2048;
  return {gpt_nano, gpt("gpt-mini", 6, 384, 6), gpt2, gpt2_xl, llama_nano, llama_7b, gpt_tall};
}

/// Number: double can't overflow.
template <class Number>
Number parameters_of(const ModelConfig& config) {
  const auto of = [](std::int64_t value) { return static_cast<Number>(value); };
  const Number width = of(config.width), hidden = of(config.hidden), vocabulary = of(config.vocabulary);
  const Number context = of(config.context), layers = of(config.layers), heads = of(config.heads);
  const Number kv_heads = of(config.kv_heads), head_dim = of(config.head_dim);
  const Number head = config.tied ? 0 : vocabulary * width;
  if (config.family == Family::gpt2) {
    const Number attention = 4 * width * width + 4 * width;
    const Number mlp = 2 * width * hidden + hidden + width;
    return (vocabulary + context) * width + layers * (attention + mlp + 4 * width) + 2 * width + head;
  }
  const Number attention = 2 * width * (heads + kv_heads) * head_dim;
  const Number biases = (config.attention_bias ? (heads + 2 * kv_heads) * head_dim : 0) +
                        (config.output_bias ? width : 0) + (config.mlp_bias ? 2 * hidden + width : 0);
  const Number block = attention + 3 * width * hidden + 2 * width + biases;
  return vocabulary * width + layers * block + width + head;
}

std::string known_presets() {
  std::string text;
  for (const std::string& name : preset_names()) text += (text.empty() ? "" : " ") + name;
  return text;
}

}  // namespace

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const ModelConfig& config : make_presets()) names.push_back(config.name);
  return names;
}

ModelConfig preset(std::string_view name) {
  for (const ModelConfig& config : make_presets())
    if (config.name == name) return config;
  throw InvalidUsage("unknown model '" + std::string(name) + "'; known: " + known_presets() +
                     ", or a Hugging Face config.json (gpt2, llama, mistral or qwen2) or its folder");
}

ModelConfig find_config(const std::string& name_or_file) {
  if (name_or_file.ends_with(".json")) return read_config(name_or_file);
  const std::vector<std::string> presets = preset_names();
  const bool known = std::find(presets.begin(), presets.end(), name_or_file) != presets.end();
  const std::filesystem::path folder = name_or_file;
  std::error_code ignored;
  if (!known && std::filesystem::is_directory(folder, ignored)) return read_config((folder / "config.json").string());
  return preset(name_or_file);
}

bool ModelConfig::same_model(ModelConfig other) const {
  other.name = name;
  other.token_ids = token_ids;
  other.note = note;
  return *this == other;
}

void validate(const ModelConfig& config) {
  const auto require = [&](bool holds, const std::string& what) {
    if (!holds) throw InvalidUsage("model " + config.name + ": " + what);
  };
  const auto positive = [&](std::int64_t value, const char* what) {
    constexpr std::int64_t kMax = 1LL << 31;  // keeps products of two values far from overflow
    require(value >= 1 && value < kMax, std::string(what) + " is " + std::to_string(value) + ", needs 1 or more");
  };
  constexpr std::int64_t kMaxLayers = 1 << 16;  // each layer creates a module before the memory is checked
  positive(config.layers, "the number of layers (num_hidden_layers, n_layer)");
  require(config.layers <= kMaxLayers, "the number of layers is " + std::to_string(config.layers) + ", at most " +
                                           std::to_string(kMaxLayers) + " are supported");
  positive(config.width, "the width (hidden_size, n_embd)");
  positive(config.heads, "the number of heads (num_attention_heads, n_head)");
  positive(config.kv_heads, "the number of key heads (num_key_value_heads)");
  positive(config.head_dim, "the head dimension (head_dim)");
  positive(config.hidden, "the hidden width (intermediate_size, n_inner)");
  positive(config.vocabulary, "the vocabulary (vocab_size)");
  positive(config.context, "the context (max_position_embeddings, n_positions)");
  require(parameters_of<double>(config) < 0x1p60, "it has more parameters than can be counted in bytes");
  require(config.heads % config.kv_heads == 0, std::to_string(config.kv_heads) +
                                                   " key heads (num_key_value_heads) don't divide " +
                                                   std::to_string(config.heads) + " heads");
  if (config.family == Family::gpt2) {
    require(config.width == config.heads * config.head_dim,
            std::to_string(config.heads) + " heads don't divide the width " + std::to_string(config.width));
    require(config.kv_heads == config.heads, "gpt2 has as many key heads as heads");
  } else {
    require(config.head_dim % 2 == 0,
            "the head dimension " + std::to_string(config.head_dim) + " is odd; rotary positions need an even one");
    require(config.activation == kernels::Activation::silu, "llama's feed-forward layer is silu");
    require(config.rope_theta > 0, "rope_theta must be above 0");
  }
  for (const double p : {config.embedding_dropout, config.residual_dropout, config.attention_dropout})
    require(p >= 0 && p < 1, "a dropout probability is " + std::to_string(p) + ", needs 0 <= p < 1");
  require(config.norm_eps > 0 && config.init_deviation >= 0,
          "the norm's epsilon (rms_norm_eps, layer_norm_epsilon) and the initial deviation (initializer_range) must "
          "not be negative");
}

std::int64_t parameter_count(const ModelConfig& config) { return parameters_of<std::int64_t>(config); }

}  // namespace tessera::nn
