// Reads and writes Hugging Face's config.json. Fields: transformers' GPT2Config, LlamaConfig, MistralConfig and
// Qwen2Config, versions 4 and 5.
#include <algorithm>

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

Activation activation_of(const Fields& fields, const char* field, const std::string& otherwise,
                         std::string_view supported) {
  const std::string name = fields.text(field, otherwise);
  if ((' ' + std::string(supported) + ' ').find(' ' + name + ' ') != std::string::npos)
    for (const auto& [known, activation] : kActivations)
      if (known == name) return activation;
  fields.fail(std::string("'") + field + ": " + name + "' is not supported; supported: " + std::string(supported));
}

std::string_view name_of(Activation activation) {
  for (const auto& [name, known] : kActivations)
    if (known == activation) return name;
  return "gelu_new";
}

/// transformers gives fields of gpt2 two names, of which the general one goes first.
std::int64_t integer(const Fields& fields, const char* general, const char* own, std::int64_t otherwise) {
  return fields.integer(general, fields.integer(own, otherwise));
}

void read_gpt2(const Fields& fields, ModelConfig& config) {
  config.family = Family::gpt2;
  config.layers = integer(fields, "num_hidden_layers", "n_layer", 12);
  config.width = integer(fields, "hidden_size", "n_embd", 768);
  config.heads = config.kv_heads = integer(fields, "num_attention_heads", "n_head", 12);
  config.head_dim = config.heads > 0 ? config.width / config.heads : 0;
  config.hidden = fields.integer("n_inner", 4 * config.width);
  config.vocabulary = fields.integer("vocab_size", 50257);
  config.context = integer(fields, "max_position_embeddings", "n_positions", 1024);
  config.activation = activation_of(fields, "activation_function", "gelu_new",
                                    "gelu_new gelu_pytorch_tanh gelu_fast gelu relu silu swish");
  config.tied = fields.flag("tie_word_embeddings", true);
  config.norm_eps = fields.number("layer_norm_epsilon", 1e-5);
  config.embedding_dropout = fields.number("embd_pdrop", 0.1);
  config.residual_dropout = fields.number("resid_pdrop", 0.1);
  config.attention_dropout = fields.number("attn_pdrop", 0.1);
  config.attention_scaled = fields.flag("scale_attn_weights", true);
  config.attention_scaled_by_layer = fields.flag("scale_attn_by_inverse_layer_idx", false);
  fields.only("add_cross_attention", false);
}

/// As transformers 5, whose configurations let the length outside replace the one inside.
void read_llama3(const Fields& fields, const Fields& inner, ModelConfig& config) {
  kernels::RopeScaling& scaling = config.rope_scaling;
  for (const char* field : {"low_freq_factor", "high_freq_factor"})
    if (!inner.contains(field)) inner.fail(std::string("the rope type 'llama3' needs '") + field + "'");
  scaling.low = inner.number("low_freq_factor", 0);
  scaling.high = inner.number("high_freq_factor", 0);
  const double inside = inner.number("original_max_position_embeddings", static_cast<double>(config.context));
  scaling.original_context = fields.number("original_max_position_embeddings", inside);
  if (scaling.original_context != inside)
    config.note = fields.origin() +
                  ": 'original_max_position_embeddings' is used as by transformers 5; transformers 4 " +
                  "would use the one in " + inner.origin();
  if (!(scaling.low > 0 && scaling.high > scaling.low && scaling.original_context > 0))
    inner.fail("needs 0 < 'low_freq_factor' < 'high_freq_factor', and positions above 0");
}

/// Fields that rope_scaling of transformers 4 and rope_parameters of 5 may have.
constexpr std::string_view kRopeFields[] = {"type",
                                            "rope_type",
                                            "rope_theta",
                                            "factor",
                                            "low_freq_factor",
                                            "high_freq_factor",
                                            "original_max_position_embeddings",
                                            "partial_rotary_factor"};

/// As transformers 5: rope_scaling replaces rope_parameters; rope_theta lies in either or outside.
void read_rope(const Fields& fields, ModelConfig& config) {
  const char* const old_field = "rope_scaling";
  const char* const field = fields.has(old_field) ? old_field : "rope_parameters";
  if (field == old_field && fields.object(field).empty()) fields.fail("'rope_scaling' is empty; leave it out");
  const double outside = fields.number("rope_theta", 10000.0);
  const Json none = Json::object();
  const Fields inner(fields.has(field) ? fields.object(field) : none, fields.origin() + ": " + field);
  inner.only_known(kRopeFields);
  config.rope_theta = inner.number("rope_theta", outside);
  if (inner.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1.0)
    fields.fail("'partial_rotary_factor' is not supported; needs 1");
  const std::string type = inner.text("rope_type", inner.text("type", "default"));
  if (type != "default" && type != "linear" && type != "llama3")
    inner.fail("the rope type '" + type + "' is not supported; supported: default linear llama3");
  if (type != "default") config.rope_scaling.factor = inner.number("factor", 0);
  if (!(config.rope_scaling.factor > 0)) inner.fail("the rope type '" + type + "' needs a 'factor' above 0");
  if (type == "llama3") read_llama3(fields, inner, config);
  if (config.rope_theta != outside || (field != old_field && type != "default"))
    config.note = inner.origin() + ": used as by transformers 5; transformers 4 would ignore " +
                  (type == "default" ? "its rope_theta" : "a part of it");
}

/// Types whose computations are Llama's, and the defaults of their fields.
struct LlamaLike {
  std::string_view type;
  std::int64_t hidden, vocabulary, context, kv_heads;  // kv_heads 0: as many as heads
  bool attention_bias;                                 // without a bias of o_proj
};
constexpr LlamaLike kLlamaLike[] = {{"llama", 11008, 32000, 2048, 0, false},
                                    {"mistral", 14336, 32000, 4096 * 32, 8, false},
                                    {"qwen2", 22016, 151936, 32768, 32, true}};

/// A window that reaches over the whole context changes nothing.
void check_window(const Fields& fields, const LlamaLike& type, const ModelConfig& config) {
  if (type.type == "llama") return;  // which has no such field
  const bool absent = !fields.contains("sliding_window"),
             used = fields.flag("use_sliding_window", type.type == "mistral");
  const std::int64_t window = fields.integer("sliding_window", absent ? 4096 : config.context);
  if (used && window < config.context)
    fields.fail("a 'sliding_window' of " + std::to_string(window) + " below 'max_position_embeddings' (" +
                std::to_string(config.context) + ") is not supported; lower the latter to train on shorter sequences");
}

void read_llama(const Fields& fields, const LlamaLike& type, ModelConfig& config) {
  config.family = Family::llama;
  config.layers = fields.integer("num_hidden_layers", 32);
  config.width = fields.integer("hidden_size", 4096);
  config.heads = fields.integer("num_attention_heads", 32);
  const bool all = type.kv_heads == 0 || fields.contains("num_key_value_heads");  // null: as many as heads
  config.kv_heads = fields.integer("num_key_value_heads", all ? config.heads : type.kv_heads);
  config.head_dim = fields.integer("head_dim", config.heads > 0 ? config.width / config.heads : 0);
  config.hidden = fields.integer("intermediate_size", type.hidden);
  config.vocabulary = fields.integer("vocab_size", type.vocabulary);
  config.context = fields.integer("max_position_embeddings", type.context);
  config.activation = activation_of(fields, "hidden_act", "silu", "silu swish");
  config.tied = fields.flag("tie_word_embeddings", false);
  config.norm_eps = fields.number("rms_norm_eps", 1e-6);
  config.attention_dropout = fields.number("attention_dropout", 0.0);
  config.attention_bias = type.attention_bias;
  if (type.type == "llama") {
    config.attention_bias = config.output_bias = fields.flag("attention_bias", false);
    config.mlp_bias = fields.flag("mlp_bias", false);
  }
  check_window(fields, type, config);
  read_rope(fields, config);
}

/// Fields of all types that change the mathematics or the weights. transformers ignores what none of its code reads.
constexpr std::string_view kUnset[] = {"quantization_config", "per_layer_config", "pruned_heads",
                                       "transformers_weights"};

/// Fields of the tokenizer's, which an export hands on.
constexpr const char* kTokenIds[] = {"bos_token_id", "eos_token_id", "pad_token_id"};

std::string token_ids_of(const Fields& fields, const Json& json) {
  const auto is_id = [](const Json& value) { return value.is_number_integer(); };
  nlohmann::ordered_json ids = nlohmann::ordered_json::object();
  for (const char* field : kTokenIds) {
    if (!json.contains(field)) continue;
    const Json& value = json.at(field);
    if (!value.is_null() && !is_id(value) && !(value.is_array() && std::ranges::all_of(value, is_id)))
      fields.fail(std::string("'") + field + "' must be an id of a token, a list of ids, or null");
    ids[field] = value;
  }
  const bool begin_and_end = ids.contains("bos_token_id") && ids.contains("eos_token_id");  // else they have defaults
  if (begin_and_end && std::ranges::all_of(ids, [](const auto& id) { return id.is_null(); })) return "";
  return ids.dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace);
}

nlohmann::ordered_json rope_json(const ModelConfig& c) {
  const kernels::RopeScaling& scaling = c.rope_scaling;
  nlohmann::ordered_json rope = {{"rope_type", "default"}, {"rope_theta", c.rope_theta}};
  if (scaling == kernels::RopeScaling{}) return rope;
  rope["rope_type"] = scaling.high == 0 ? "linear" : "llama3";
  rope["factor"] = scaling.factor;
  if (scaling.high == 0) return rope;
  rope["low_freq_factor"] = scaling.low;
  rope["high_freq_factor"] = scaling.high;
  rope["original_max_position_embeddings"] = static_cast<std::int64_t>(scaling.original_context);
  return rope;
}

}  // namespace

ModelConfig parse_config(std::string_view text, const std::string& origin) {
  const Json json = internal::parse_object(text, origin);
  const Fields fields(json, origin);
  ModelConfig config;
  config.name = origin;
  const std::string type = fields.text("model_type", "");
  const auto* const like = std::ranges::find(kLlamaLike, std::string_view(type), &LlamaLike::type);
  if (type == "gpt2") {
    read_gpt2(fields, config);
  } else if (like != std::end(kLlamaLike)) {
    read_llama(fields, *like, config);
  } else {
    fields.fail("model_type '" + type + "' is not supported; supported: gpt2 llama mistral qwen2");
  }
  for (const std::string_view field : kUnset) fields.only_unset(field);
  fields.only("is_causal", true);  // read by what makes the masks
  config.token_ids = token_ids_of(fields, json);
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
  if (c.token_ids.empty()) json["bos_token_id"] = json["eos_token_id"] = nullptr;
  if (!c.token_ids.empty()) json.update(nlohmann::ordered_json::parse(c.token_ids));
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
    if (!c.attention_scaled) json["scale_attn_weights"] = false;
    if (c.attention_scaled_by_layer) json["scale_attn_by_inverse_layer_idx"] = true;
  } else {
    const bool qwen2 = c.attention_bias && !c.output_bias;
    json["model_type"] = qwen2 ? "qwen2" : "llama";
    json["architectures"] = {qwen2 ? "Qwen2ForCausalLM" : "LlamaForCausalLM"};
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
    json["rope_parameters"] = rope_json(c);
    if (c.rope_scaling != kernels::RopeScaling{}) json["rope_scaling"] = rope_json(c);
    json["attention_bias"] = c.attention_bias;
    json["mlp_bias"] = c.mlp_bias;
    json["attention_dropout"] = c.attention_dropout;
  }
  return json.dump(2) + "\n";
}

}  // namespace tessera::nn
