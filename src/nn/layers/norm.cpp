#include "tessera/nn/layers/norm.h"

#include "tessera/nn/ops/arithmetic.h"

namespace tessera::nn {
namespace {

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

}  // namespace

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

}  // namespace tessera::nn
