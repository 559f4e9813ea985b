// Self-attention in the variants of GPT-2 and Llama.
#pragma once

#include "tessera/nn/layers/dropout.h"
#include "tessera/nn/layers/linear.h"
#include "tessera/nn/ops/rope.h"

namespace tessera::nn {

/// Settings of SelfAttention.
struct SelfAttentionOptions {
  std::int64_t width = 0;              ///< width of x; divisible by `heads`
  std::int64_t heads = 0;              ///< heads of width / heads elements each
  double deviation = 0.02;             ///< deviation of c_attn's initial weights
  double projection_deviation = 0.02;  ///< deviation of c_proj
  double residual_dropout = 0.0;       ///< probability for the output
  double attention_dropout = 0.0;      ///< probability for the attention weights
  double scale = 0.0;                  ///< scale of the scores; 0: 1 / sqrt(width / heads)
  bool causal = true;                  ///< each position sees itself and earlier ones; false: all
};

/// x[batch, position, width] -> the same shape. Children: c_attn ([width, 3 * width]), c_proj, and a dropout.
class TESSERA_API SelfAttention : public Layer<SelfAttention> {
 public:
  /// Parameters get no memory; see Module::materialize().
  SelfAttention(Context& context, const SelfAttentionOptions& options);
  Tensor forward(const Tensor& x);  ///< x and result: [batch, position, width]

 private:
  const std::int64_t heads_;
  const double attention_dropout_;
  const double scale_;
  const bool causal_;
  Linear& c_attn_;
  Linear& c_proj_;
  Dropout& resid_dropout_;
};

/// Rotary tables, computed at first use and shared by the layers of a model.
class TESSERA_API RotaryEmbedding {
 public:
  explicit RotaryEmbedding(const ops::RopeSettings& settings) : settings_(settings) {}  ///< allocates nothing yet
  /// The tables, in `context`'s memory. The first call computes them; later calls ignore `context`.
  const ops::RopeTable& table(Context& context);

 private:
  const ops::RopeSettings settings_;
  ops::RopeTable table_;
};

/// Settings of GroupedAttention.
struct GroupedAttentionOptions {
  std::int64_t width = 0;                   ///< width of x
  std::int64_t heads = 0;                   ///< query heads
  std::int64_t kv_heads = 0;                ///< key and value heads; divides `heads`
  std::int64_t head_dim = 0;                ///< elements of a head
  double deviation = 0.02;                  ///< deviation of the initial weights
  double attention_dropout = 0.0;           ///< probability for the attention weights
  bool bias = false;                        ///< whether the projections of x have a bias
  bool output_bias = false;                 ///< whether o_proj has a bias
  std::shared_ptr<RotaryEmbedding> rotary;  ///< shared by the layers of a model; must not be null
};

/// Grouped-query attention with rotary positions. Children: q_proj, k_proj, v_proj, o_proj.
class TESSERA_API GroupedAttention : public Layer<GroupedAttention> {
 public:
  /// Parameters get no memory; see Module::materialize().
  GroupedAttention(Context& context, const GroupedAttentionOptions& options);
  Tensor forward(const Tensor& x);  ///< x and result: [batch, position, width]

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
