#include "tessera/nn/layers/attention.h"

#include "tessera/nn/ops/attention.h"

namespace tessera::nn {
namespace {

/// Of x to `heads` heads.
LinearOptions projection(const GroupedAttentionOptions& options, std::int64_t heads) {
  return {.in = options.width, .out = heads * options.head_dim, .bias = options.bias, .deviation = options.deviation};
}

}  // namespace

SelfAttention::SelfAttention(Context& context, const SelfAttentionOptions& options)
    : Layer(context),
      heads_(options.heads),
      attention_dropout_(options.attention_dropout),
      scale_(options.scale),
      causal_(options.causal),
      c_attn_(add<Linear>("c_attn", conv1d(options.width, 3 * options.width, options.deviation))),
      c_proj_(add<Linear>("c_proj", conv1d(options.width, options.width, options.projection_deviation))),
      resid_dropout_(add<Dropout>("resid_dropout", options.residual_dropout)) {}

Tensor SelfAttention::forward(const Tensor& x) {
  return resid_dropout_(c_proj_(ops::attention(
      c_attn_(x), heads_, {.causal = causal_, .dropout = attention_dropout_, .module = path(), .scale = scale_})));
}

const ops::RopeTable& RotaryEmbedding::table(Context& context) {
  if (!table_.cosine) table_ = ops::make_rope_table(context, settings_);
  return table_;
}

GroupedAttention::GroupedAttention(Context& context, const GroupedAttentionOptions& options)
    : Layer(context),
      heads_(options.heads),
      kv_heads_(options.kv_heads),
      attention_dropout_(options.attention_dropout),
      rotary_(options.rotary),
      q_proj_(add<Linear>("q_proj", projection(options, options.heads))),
      k_proj_(add<Linear>("k_proj", projection(options, options.kv_heads))),
      v_proj_(add<Linear>("v_proj", projection(options, options.kv_heads))),
      o_proj_(add<Linear>("o_proj", LinearOptions{.in = options.heads * options.head_dim,
                                                  .out = options.width,
                                                  .bias = options.output_bias,
                                                  .deviation = options.deviation})) {}

Tensor GroupedAttention::forward(const Tensor& x) {
  const ops::RopeTable& table = rotary_->table(context());
  const Tensor q = ops::rope(q_proj_(x), table, heads_);
  const Tensor k = ops::rope(k_proj_(x), table, kv_heads_);
  return o_proj_(
      ops::attention(q, k, v_proj_(x), {heads_, kv_heads_}, {.dropout = attention_dropout_, .module = path()}));
}

}  // namespace tessera::nn
