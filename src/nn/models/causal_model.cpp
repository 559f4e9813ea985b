#include "tessera/nn/models/causal_model.h"

#include "tessera/nn/models/gpt2.h"
#include "tessera/nn/models/llama.h"
#include "tessera/nn/ops/cross_entropy.h"

namespace tessera::nn {

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

}  // namespace tessera::nn
