// Llama (H. Touvron et al., 2023) with the names, shapes and initial values of Hugging Face's LlamaForCausalLM.
#pragma once

#include "tessera/nn/layers/attention.h"
#include "tessera/nn/layers/mlp.h"
#include "tessera/nn/layers/norm.h"
#include "tessera/nn/models/causal_model.h"
#include "tessera/nn/models/head.h"

namespace tessera::nn {

/// X + self_attn(input_layernorm(x)), then x + mlp(post_attention_layernorm(x)).
class TESSERA_API LlamaBlock : public Layer<LlamaBlock> {
 public:
  /// `rotary` is shared by the blocks of a model.
  LlamaBlock(Context& context, const ModelConfig& config, std::shared_ptr<RotaryEmbedding> rotary);
  Tensor forward(const Tensor& x);  ///< x and result: [batch, position, width]

 private:
  GroupedAttention& self_attn_;
  GatedMlp& mlp_;
  RMSNorm& input_layernorm_;
  RMSNorm& post_attention_layernorm_;
};

/// Children: model.embed_tokens, model.layers.0 .., model.norm, lm_head.
class TESSERA_API Llama : public CausalModel {
 public:
  /// `config` is valid and of family llama; see make_model().
  Llama(Context& context, const ModelConfig& config);

 private:
  Tensor hidden(const Tensor& tokens) override;
  Tensor logits(const Tensor& x) override { return lm_head_(x); }
  Tensor mean_loss(const Tensor& x, const Tensor& targets) override { return lm_head_(x, targets); }

  Embedding& embed_tokens_;
  std::vector<LlamaBlock*> blocks_;
  RMSNorm& norm_;
  LmHead& lm_head_;
};

}  // namespace tessera::nn
