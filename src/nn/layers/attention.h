// Causal self-attention in the variants of GPT-2 and Llama.
#pragma once

#include "tessera/nn/layers/dropout.h"
#include "tessera/nn/layers/linear.h"
#include "tessera/nn/ops/rope.h"

namespace tessera::nn {

struct SelfAttentionOptions {
  std::int64_t width = 0;
  std::int64_t heads = 0;
  double deviation = 0.02;
  double projection_deviation = 0.02;  ///< of c_proj
  double residual_dropout = 0.0;
  double attention_dropout = 0.0;
};

/// x[batch, position, width] -> the same shape. Children: c_attn ([width, 3 * width]), c_proj, and a dropout.
class TESSERA_API SelfAttention : public Layer<SelfAttention> {
 public:
  SelfAttention(Context& context, const SelfAttentionOptions& options);
  Tensor forward(const Tensor& x);

 private:
  const std::int64_t heads_;
  const double attention_dropout_;
  Linear& c_attn_;
  Linear& c_proj_;
  Dropout& resid_dropout_;
};

/// Rotary tables, computed at first use and shared by the layers of a model.
class TESSERA_API RotaryEmbedding {
 public:
  explicit RotaryEmbedding(const ops::RopeSettings& settings) : settings_(settings) {}
  const ops::RopeTable& table(Context& context);

 private:
  const ops::RopeSettings settings_;
  ops::RopeTable table_;
};

struct GroupedAttentionOptions {
  std::int64_t width = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  double deviation = 0.02;
  double attention_dropout = 0.0;
  std::shared_ptr<RotaryEmbedding> rotary;
};

/// Grouped-query attention with rotary positions. Children: q_proj, k_proj, v_proj, o_proj, without biases.
class TESSERA_API GroupedAttention : public Layer<GroupedAttention> {
 public:
  GroupedAttention(Context& context, const GroupedAttentionOptions& options);
  Tensor forward(const Tensor& x);

 private:
  const std::int64_t heads_;
  const std::int64_t kv_heads_;
  const double attention_dropout_;
  const std::shared_ptr<RotaryEmbedding> rotary_;
  Linear& q_proj_;
  Linear& k_proj_;
  Linear& v_proj_;
  Linear& o_proj_;
};

}  // namespace tessera::nn
