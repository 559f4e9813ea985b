// Model configurations: presets, and Hugging Face's config.json of types gpt2, llama, mistral and qwen2 (transformers 4
// and 5).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/nn/kernels/activation.h"
#include "tessera/nn/kernels/rope.h"

namespace tessera::nn {

/// Shape and settings of a model, with Hugging Face's meanings.
struct ModelConfig {
  /// The architecture.
  enum class Family : std::uint8_t { gpt2, llama };
  Family family = Family::gpt2;  ///< default: gpt2
  std::string name;              ///< name of the preset, or the file that it was read from
  std::int64_t layers = 0;       ///< transformer blocks
  std::int64_t width = 0;        ///< elements of a hidden state
  std::int64_t heads = 0;        ///< query heads
  std::int64_t kv_heads = 0;     ///< llama; gpt2: = heads
  std::int64_t head_dim = 0;     ///< gpt2: width / heads
  std::int64_t hidden = 0;       ///< width of the feed-forward layers
  std::int64_t vocabulary = 0;   ///< token ids, from 0
  std::int64_t context = 0;      ///< maximum number of positions
  kernels::Activation activation = kernels::Activation::gelu_tanh;  ///< activation of gpt2; llama uses SwiGLU
  bool tied = true;                                                 ///< the head uses the token embedding
  double norm_eps = 1e-5;                                           ///< epsilon of all layer or RMS norms
  double init_deviation = 0.02;                                     ///< standard deviation of initial weights
  double rope_theta = 10000.0;                                      ///< base of the rotary angles; llama
  double embedding_dropout = 0.0;                                   ///< probability, after the embeddings; gpt2
  double residual_dropout = 0.0;           ///< probability, after attention and feed-forward layers; gpt2
  double attention_dropout = 0.0;          ///< probability, of the attention weights
  kernels::RopeScaling rope_scaling = {};  ///< llama
  bool attention_scaled = true;            ///< gpt2: attention scores are divided by the root of head_dim ...
  bool attention_scaled_by_layer = false;  ///< ... and by the layer's number, from 1
  bool attention_bias = false;             ///< llama: q_proj, k_proj and v_proj have biases
  bool output_bias = false;                ///< llama: o_proj has a bias
  bool mlp_bias = false;                   ///< llama: the feed-forward layers have biases
  /// Ids of special tokens, which training doesn't use: the text of a JSON object. "": the model has none.
  std::string token_ids;
  std::string note;  ///< a line for the user if versions of transformers read the file differently; else ""

  bool operator==(const ModelConfig&) const = default;  ///< compares all members, with the name and the note
  /// True if both have the same parameters and outputs.
  TESSERA_API bool same_model(ModelConfig other) const;
};

/// "gpt-nano", "gpt-mini", "gpt2", "gpt2-xl", "llama-nano", "llama-7b", "gpt-tall".
TESSERA_API std::vector<std::string> preset_names();

/// Throws InvalidUsage that lists the presets.
TESSERA_API ModelConfig preset(std::string_view name);

/// A preset's name, a path that ends in ".json", or a folder with a config.json. A preset comes before a folder of the
/// same name. Throws InvalidUsage.
TESSERA_API ModelConfig find_config(const std::string& name_or_file);

/// Reads a config.json as transformers 5 does, which ignores fields that it doesn't know. Settings of transformers that
/// are not supported throw InvalidUsage that names the field.
TESSERA_API ModelConfig read_config(const std::string& path);
/// Parses the text of a config.json; `origin` names it in errors.
TESSERA_API ModelConfig parse_config(std::string_view text, const std::string& origin);

/// The text of a config.json that transformers 4 and 5 read. Models of type mistral are written as llama.
TESSERA_API std::string config_json(const ModelConfig& config);

/// Throws InvalidUsage if the values are inconsistent.
TESSERA_API void validate(const ModelConfig& config);

/// Number of parameters, tied ones counted once.
TESSERA_API std::int64_t parameter_count(const ModelConfig& config);

}  // namespace tessera::nn
