#include "tessera/nn/models/llama.h"

#include "tessera/nn/ops/arithmetic.h"

namespace tessera::nn {
namespace {

GroupedAttentionOptions attention_options(const ModelConfig& config, std::shared_ptr<RotaryEmbedding> rotary) {
  return {config.width,          config.heads,          config.kv_heads,
          config.head_dim,       config.init_deviation, config.attention_dropout,
          config.attention_bias, config.output_bias,    std::move(rotary)};
}

}  // namespace

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
