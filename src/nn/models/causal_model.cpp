#include "tessera/nn/models/causal_model.h"

#include <cmath>

#include "tessera/nn/models/gpt2.h"
#include "tessera/nn/models/llama.h"
#include "tessera/nn/ops/arithmetic.h"
#include "tessera/nn/ops/cast.h"
#include "tessera/nn/ops/cross_entropy.h"
#include "tessera/nn/ops/embedding.h"

namespace tessera::nn {
namespace {

/// Hugging Face scales the projections onto the residual stream by 1 / sqrt(2 * layers).
double projection_deviation(const ModelConfig& config) {
  return config.init_deviation / std::sqrt(2.0 * static_cast<double>(config.layers));
}

SelfAttentionOptions attention_options(const ModelConfig& config, std::int64_t layer) {
  const double scale = config.attention_scaled ? 1 / std::sqrt(static_cast<double>(config.head_dim)) : 1;
  const double depth = config.attention_scaled_by_layer ? static_cast<double>(layer + 1) : 1;
  return {config.width,
          config.heads,
          config.init_deviation,
          projection_deviation(config),
          config.residual_dropout,
          config.attention_dropout,
          config.attention_scaled && depth == 1 ? 0 : scale / depth};
}

GroupedAttentionOptions attention_options(const ModelConfig& config, std::shared_ptr<RotaryEmbedding> rotary) {
  return {config.width,          config.heads,          config.kv_heads,
          config.head_dim,       config.init_deviation, config.attention_dropout,
          config.attention_bias, config.output_bias,    std::move(rotary)};
}

}  // namespace

CausalModel::CausalModel(Context& context, ModelConfig config) : Layer(context), config_(std::move(config)) {}

Tensor CausalModel::forward(const Tensor& tokens, const Tensor& targets) {
  if (tokens.shape().size() != 2 || tokens.shape() != targets.shape() || tokens.dim(1) > config_.context)
    throw InvalidUsage("model " + config_.name + ": tokens have shape " + to_string(tokens.shape()) + " and targets " +
                       to_string(targets.shape()) + "; both need [batch, position], at most " +
                       std::to_string(config_.context) + " positions");
  return mean_loss(hidden(tokens), targets);
}

Tensor CausalModel::mean_loss(const Tensor& hidden, const Tensor& targets) {
  return ops::cross_entropy(logits(hidden), targets, {.overwrite_logits = true});
}

std::unique_ptr<CausalModel> make_model(Context& context, const ModelConfig& config) {
  validate(config);
  if (config.family == ModelConfig::Family::gpt2) return std::make_unique<Gpt2>(context, config);
  return std::make_unique<Llama>(context, config);
}

Gpt2Block::Gpt2Block(Context& context, const ModelConfig& config, std::int64_t layer)
    : Layer(context),
      ln_1_(add<LayerNorm>("ln_1", NormOptions{config.width, config.norm_eps})),
      attn_(add<SelfAttention>("attn", attention_options(config, layer))),
      ln_2_(add<LayerNorm>("ln_2", NormOptions{config.width, config.norm_eps})),
      mlp_(add<Mlp>("mlp", MlpOptions{config.width, config.hidden, config.activation, config.init_deviation,
                                      projection_deviation(config), config.residual_dropout})) {
  mark_block();
}

Tensor Gpt2Block::forward(const Tensor& x) {
  const ops::SummedNorm middle = ln_2_.of_sum(x, attn_(ln_1_(x)));
  return ops::add(middle.sum, mlp_(middle.normalized));
}

Gpt2::Gpt2(Context& context, const ModelConfig& config)
    : CausalModel(context, config),
      wte_(add<Embedding>("wte", EmbeddingOptions{config.vocabulary, config.width, config.init_deviation})),
      wpe_(add<Embedding>("wpe", EmbeddingOptions{config.context, config.width, config.init_deviation})),
      drop_(add<Dropout>("drop", config.embedding_dropout)),
      blocks_([&] {
        std::vector<Gpt2Block*> blocks;
        for (std::int64_t i = 0; i < config.layers; ++i)
          blocks.push_back(&add<Gpt2Block>("h." + std::to_string(i), config, i));
        return blocks;
      }()),
      ln_f_(add<LayerNorm>("ln_f", NormOptions{config.width, config.norm_eps})),
      lm_head_(add<LmHead>("lm_head", wte_, config.tied, config.init_deviation)) {}

Tensor Gpt2::embedded(const Tensor& tokens) {
  if (wte_.dtype() != wpe_.dtype()) {
    const Tensor words = wte_(tokens);  // first, with every compiler
    return ops::add(words, wpe_(ops::positions_of(tokens)));
  }
  // One kernel reads both tables; the hooks of both modules enclose it.
  wte_.notify_forward_begins();
  wpe_.notify_forward_begins();
  Tensor x = ops::cast(ops::embedding(tokens, wte_.weight(), wpe_.weight()), dtype());
  wpe_.notify_forward_ends();
  wte_.notify_forward_ends();
  return x;
}

Tensor Gpt2::hidden(const Tensor& tokens) {
  Tensor x = drop_(embedded(tokens));
  for (Gpt2Block* block : blocks_) x = (*block)(x);
  return ln_f_(x);
}

LlamaBlock::LlamaBlock(Context& context, const ModelConfig& config, std::shared_ptr<RotaryEmbedding> rotary)
    : Layer(context),
      self_attn_(add<GroupedAttention>("self_attn", attention_options(config, std::move(rotary)))),
      mlp_(add<GatedMlp>("mlp", GatedMlpOptions{config.width, config.hidden, config.init_deviation, config.mlp_bias})),
      input_layernorm_(add<RMSNorm>("input_layernorm", NormOptions{config.width, config.norm_eps})),
      post_attention_layernorm_(add<RMSNorm>("post_attention_layernorm", NormOptions{config.width, config.norm_eps})) {
  mark_block();
}

Tensor LlamaBlock::forward(const Tensor& x) {
  const ops::SummedNorm middle = post_attention_layernorm_.of_sum(x, self_attn_(input_layernorm_(x)));
  return ops::add(middle.sum, mlp_(middle.normalized));
}

Llama::Llama(Context& context, const ModelConfig& config)
    : CausalModel(context, config),
      embed_tokens_(add<Embedding>("model.embed_tokens",
                                   EmbeddingOptions{config.vocabulary, config.width, config.init_deviation})),
      blocks_([&] {
        const auto rotary = std::make_shared<RotaryEmbedding>(
            ops::RopeSettings{config.context, config.head_dim, config.rope_theta, config.rope_scaling});
        std::vector<LlamaBlock*> blocks;
        for (std::int64_t i = 0; i < config.layers; ++i)
          blocks.push_back(&add<LlamaBlock>("model.layers." + std::to_string(i), config, rotary));
        return blocks;
      }()),
      norm_(add<RMSNorm>("model.norm", NormOptions{config.width, config.norm_eps})),
      lm_head_(add<LmHead>("lm_head", embed_tokens_, config.tied, config.init_deviation)) {}

Tensor Llama::hidden(const Tensor& tokens) {
  Tensor x = embed_tokens_(tokens);
  for (LlamaBlock* block : blocks_) x = (*block)(x);
  return norm_(x);
}

}  // namespace tessera::nn
