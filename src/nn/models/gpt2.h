// GPT-2 (A. Radford et al., 2019) with the names, shapes and initial values of Hugging Face's GPT2LMHeadModel.
#pragma once

#include "tessera/nn/layers/attention.h"
#include "tessera/nn/layers/mlp.h"
#include "tessera/nn/layers/norm.h"
#include "tessera/nn/models/causal_model.h"
#include "tessera/nn/models/head.h"

namespace tessera::nn {

/// x + attn(ln_1(x)), then x + mlp(ln_2(x)).
class TESSERA_API Gpt2Block : public Layer<Gpt2Block> {
 public:
  /// Called by Gpt2; marks itself as a block.
  Gpt2Block(Context& context, const ModelConfig& config, std::int64_t layer = 0);
  Tensor forward(const Tensor& x);  ///< x and result: [batch, position, width]

 private:
  LayerNorm& ln_1_;
  SelfAttention& attn_;
  LayerNorm& ln_2_;
  Mlp& mlp_;
};

/// Children: wte, wpe, drop, h.0 .., ln_f, lm_head.
class TESSERA_API Gpt2 : public CausalModel {
 public:
  /// `config` is valid and of family gpt2; see make_model().
  Gpt2(Context& context, const ModelConfig& config);

 private:
  Tensor embedded(const Tensor& tokens);
  Tensor hidden(const Tensor& tokens) override;
  Tensor logits(const Tensor& x) override { return lm_head_(x); }
  Tensor mean_loss(const Tensor& x, const Tensor& targets) override { return lm_head_(x, targets); }

  Embedding& wte_;
  Embedding& wpe_;
  Dropout& drop_;
  std::vector<Gpt2Block*> blocks_;
  LayerNorm& ln_f_;
  LmHead& lm_head_;
};

}  // namespace tessera::nn
