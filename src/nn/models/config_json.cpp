// Reads and writes Hugging Face's config.json. Fields: transformers' GPT2Config and LlamaConfig, versions 4 and 5.
#include "tessera/nn/io/json_fields.h"
#include "tessera/nn/models/config.h"

namespace tessera::nn {
namespace {

using Family = ModelConfig::Family;
using internal::Fields;
using internal::Json;
using kernels::Activation;

/// A file is written with the first name of its activation.
constexpr std::pair<std::string_view, Activation> kActivations[] = {
    {"gelu_new", Activation::gelu_tanh},  {"gelu_pytorch_tanh", Activation::gelu_tanh},
    {"gelu_fast", Activation::gelu_tanh}, {"gelu", Activation::gelu_erf},
    {"relu", Activation::relu},           {"silu", Activation::silu},
    {"swish", Activation::silu}};

Activation activation_of(const Fields& fields, const std::string& name) {
  for (const auto& [known, activation] : kActivations)
    if (known == name) return activation;
  fields.fail("activation '" + name + "' is not supported; supported: gelu_new gelu_pytorch_tanh gelu relu silu");
}

std::string_view name_of(Activation activation) {
  for (const auto& [name, known] : kActivations)
    if (known == activation) return name;
  return "gelu_new";
}

void read_gpt2(const Fields& fields, ModelConfig& config) {
  config.family = Family::gpt2;
  config.layers = fields.integer("n_layer", 12);
  config.width = fields.integer("n_embd", 768);
  config.heads = config.kv_heads = fields.integer("n_head", 12);
  config.head_dim = config.heads > 0 ? config.width / config.heads : 0;
  config.hidden = fields.integer("n_inner", config.width < (1LL << 40) ? 4 * config.width : 0);
  config.vocabulary = fields.integer("vocab_size", 50257);
  config.context = fields.integer("n_positions", 1024);
  config.activation = activation_of(fields, fields.text("activation_function", "gelu_new"));
  config.tied = fields.flag("tie_word_embeddings", true);
  config.norm_eps = fields.number("layer_norm_epsilon", 1e-5);
  config.embedding_dropout = fields.number("embd_pdrop", 0.1);
  config.residual_dropout = fields.number("resid_pdrop", 0.1);
  config.attention_dropout = fields.number("attn_pdrop", 0.1);
  fields.only("scale_attn_weights", true);
  fields.only("scale_attn_by_inverse_layer_idx", false);
  fields.only("add_cross_attention", false);
}

/// Reads rope_theta and rope_scaling of transformers 4, rope_parameters of 5.
double read_rope(const Fields& fields) {
  if (fields.has("rope_scaling")) {
    const Json& scaling = fields.at("rope_scaling");
    if (!scaling.is_object()) fields.fail("'rope_scaling' must be an object");
    const Fields inner(scaling, fields.origin() + ": rope_scaling");
    const std::string type = inner.text("rope_type", inner.text("type", "?"));
    if (type != "default") fields.fail("rope scaling ('rope_scaling' of type " + type + ") is not supported");
  }
  if (!fields.has("rope_parameters")) return fields.number("rope_theta", 10000.0);
  const Json& parameters = fields.at("rope_parameters");
  if (!parameters.is_object()) fields.fail("'rope_parameters' must be an object");
  const Fields inner(parameters, fields.origin() + ": rope_parameters");
  const std::string type = inner.text("rope_type", "default");
  if (type != "default") fields.fail("rope scaling ('rope_parameters' of type " + type + ") is not supported");
  if (inner.number("partial_rotary_factor", 1.0) != 1.0) fields.fail("'partial_rotary_factor' is not supported");
  return inner.number("rope_theta", fields.number("rope_theta", 10000.0));
}

void read_llama(const Fields& fields, ModelConfig& config) {
  config.family = Family::llama;
  config.layers = fields.integer("num_hidden_layers", 32);
  config.width = fields.integer("hidden_size", 4096);
  config.heads = fields.integer("num_attention_heads", 32);
  config.kv_heads = fields.integer("num_key_value_heads", config.heads);
  config.head_dim = fields.integer("head_dim", config.heads > 0 ? config.width / config.heads : 0);
  config.hidden = fields.integer("intermediate_size", 11008);
  config.vocabulary = fields.integer("vocab_size", 32000);
  config.context = fields.integer("max_position_embeddings", 2048);
  config.activation = activation_of(fields, fields.text("hidden_act", "silu"));
  config.tied = fields.flag("tie_word_embeddings", false);
  config.norm_eps = fields.number("rms_norm_eps", 1e-6);
  config.attention_dropout = fields.number("attention_dropout", 0.0);
  config.rope_theta = read_rope(fields);
  fields.only("attention_bias", false);
  fields.only("mlp_bias", false);
}

}  // namespace

ModelConfig parse_config(std::string_view text, const std::string& origin) {
  const Json json = internal::parse_object(text, origin);
  const Fields fields(json, origin);
  ModelConfig config;
  config.name = origin;
  const std::string type = fields.text("model_type", "");
  if (type == "gpt2") {
    read_gpt2(fields, config);
  } else if (type == "llama") {
    read_llama(fields, config);
  } else {
    fields.fail("model_type '" + type + "' is not supported; supported: gpt2 llama");
  }
  config.init_deviation = fields.number("initializer_range", 0.02);
  validate(config);
  return config;
}

ModelConfig read_config(const std::string& path) { return parse_config(internal::read_text(path), path); }

std::string config_json(const ModelConfig& c) {
  nlohmann::ordered_json json;
  json["initializer_range"] = c.init_deviation;
  json["vocab_size"] = c.vocabulary;
  json["tie_word_embeddings"] = c.tied;
  json["torch_dtype"] = "float32";
  json["use_cache"] = true;
  json["bos_token_id"] = nullptr;
  json["eos_token_id"] = nullptr;
  if (c.family == Family::gpt2) {
    json["model_type"] = "gpt2";
    json["architectures"] = {"GPT2LMHeadModel"};
    json["n_layer"] = c.layers;
    json["n_embd"] = c.width;
    json["n_head"] = c.heads;
    json["n_inner"] = c.hidden;
    json["n_positions"] = c.context;
    json["n_ctx"] = c.context;
    json["activation_function"] = name_of(c.activation);
    json["layer_norm_epsilon"] = c.norm_eps;
    json["embd_pdrop"] = c.embedding_dropout;
    json["resid_pdrop"] = c.residual_dropout;
    json["attn_pdrop"] = c.attention_dropout;
  } else {
    json["model_type"] = "llama";
    json["architectures"] = {"LlamaForCausalLM"};
    json["num_hidden_layers"] = c.layers;
    json["hidden_size"] = c.width;
    json["num_attention_heads"] = c.heads;
    json["num_key_value_heads"] = c.kv_heads;
    json["head_dim"] = c.head_dim;
    json["intermediate_size"] = c.hidden;
    json["max_position_embeddings"] = c.context;
    json["hidden_act"] = name_of(c.activation);
    json["rms_norm_eps"] = c.norm_eps;
    json["rope_theta"] = c.rope_theta;
    json["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", c.rope_theta}};
    json["attention_bias"] = false;
    json["mlp_bias"] = false;
    json["attention_dropout"] = c.attention_dropout;
  }
  return json.dump(2) + "\n";
}

}  // namespace tessera::nn
