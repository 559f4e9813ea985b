// The layers of few lines each.
#include "tessera/nn/layers/attention.h"
#include "tessera/nn/layers/embedding.h"
#include "tessera/nn/layers/mlp.h"
#include "tessera/nn/layers/norm.h"
#include "tessera/nn/layers/sequential.h"
#include "tessera/nn/ops/arithmetic.h"
#include "tessera/nn/ops/attention.h"
#include "tessera/nn/ops/embedding.h"

namespace tessera::nn {
namespace {

LinearOptions projection(const GatedMlpOptions& options, std::int64_t in, std::int64_t out) {
  return {.in = in, .out = out, .bias = options.bias, .deviation = options.deviation};
}

/// Keeps the output of a norm with hooks, which may be a unit of its own: its parameters have no memory while the
/// backward of its consumer runs.
Tensor keep_if_unit(const Module& norm, Tensor y) {
  const ModuleHooks& hooks = norm.hooks();
  if (hooks.pre_forward || hooks.post_forward || hooks.pre_backward || hooks.post_backward)
    y.set_recomputation(nullptr);
  return y;
}

/// See LayerNorm::of_sum(). `in_two`: by two operations; else `run` is the one.
template <class Norm, class Run>
ops::SummedNorm norm_of_sum(Norm& norm, const Tensor& x, const Tensor& added, bool in_two, const Run& run) {
  if (in_two) {
    const Tensor sum = ops::add(x, added);
    return {sum, norm(sum)};
  }
  norm.notify_forward_begins();
  ops::SummedNorm result = run();
  keep_if_unit(norm, result.normalized);
  norm.notify_forward_ends();
  return result;
}

/// Of x to `heads` heads.
LinearOptions projection(const GroupedAttentionOptions& options, std::int64_t heads) {
  return {.in = options.width, .out = heads * options.head_dim, .bias = options.bias, .deviation = options.deviation};
}

}  // namespace

Mlp::Mlp(Context& context, const MlpOptions& options)
    : Layer(context),
      activation_(options.activation),
      c_fc_(add<Linear>("c_fc", conv1d(options.width, options.hidden, options.deviation))),
      c_proj_(add<Linear>("c_proj", conv1d(options.hidden, options.width, options.projection_deviation))),
      dropout_(add<Dropout>("dropout", options.residual_dropout)) {}

Tensor Mlp::forward(const Tensor& x) { return dropout_(c_proj_(c_fc_(x, activation_))); }

GatedMlp::GatedMlp(Context& context, const GatedMlpOptions& options)
    : Layer(context),
      gate_proj_(add<Linear>("gate_proj", projection(options, options.width, options.hidden))),
      up_proj_(add<Linear>("up_proj", projection(options, options.width, options.hidden))),
      down_proj_(add<Linear>("down_proj", projection(options, options.hidden, options.width))) {}

Tensor GatedMlp::forward(const Tensor& x) {
  // Arguments of one call are evaluated in an order of the compiler's, which would be that of the gradients' sum.
  const Tensor gate = gate_proj_(x);
  const Tensor up = up_proj_(x);
  return down_proj_(ops::swiglu(gate, up));
}

Embedding::Embedding(Context& context, const EmbeddingOptions& options)
    : Layer(context),
      weight_(add_parameter("weight", {options.rows, options.width}, Init::normal(options.deviation))) {}

Tensor Embedding::forward(const Tensor& ids) { return ops::embedding(ids, weight_.tensor()); }

LayerNorm::LayerNorm(Context& context, const NormOptions& options)
    : Layer(context),
      eps_(options.eps),
      weight_(add_parameter("weight", {options.width}, Init::ones())),
      bias_(add_parameter("bias", {options.width}, Init::zeros())) {}

Tensor LayerNorm::forward(const Tensor& x) {
  return keep_if_unit(*this, ops::layer_norm(x, weight_.tensor(), bias_.tensor(), eps_));
}

ops::SummedNorm LayerNorm::of_sum(const Tensor& x, const Tensor& added) {
  return norm_of_sum(*this, x, added, is_boundary() || checkpoints_activations(),
                     [&] { return ops::add_layer_norm(x, added, weight_.tensor(), bias_.tensor(), eps_); });
}

RMSNorm::RMSNorm(Context& context, const NormOptions& options)
    : Layer(context), eps_(options.eps), weight_(add_parameter("weight", {options.width}, Init::ones())) {}

Tensor RMSNorm::forward(const Tensor& x) { return keep_if_unit(*this, ops::rms_norm(x, weight_.tensor(), eps_)); }

ops::SummedNorm RMSNorm::of_sum(const Tensor& x, const Tensor& added) {
  return norm_of_sum(*this, x, added, is_boundary() || checkpoints_activations(),
                     [&] { return ops::add_rms_norm(x, added, weight_.tensor(), eps_); });
}

Sequential& Sequential::append(std::function<Tensor(const Tensor&)> function) {
  calls_.push_back(std::move(function));
  return *this;
}

Tensor Sequential::forward(const Tensor& x) {
  Tensor y = x;
  for (const auto& call : calls_) y = call(y);
  return y;
}

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
