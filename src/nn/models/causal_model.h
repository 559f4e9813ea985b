// The common base of the model families.
#pragma once

#include <memory>

#include "tessera/nn/models/config.h"
#include "tessera/nn/module.h"

namespace tessera::nn {

/// A decoder that predicts the next token. Parameters are named as in Hugging Face's checkpoints; is_block() is true
/// for its blocks.
class TESSERA_API CausalModel : public Layer<CausalModel> {
 public:
  /// `config` is valid; see make_model().
  CausalModel(Context& context, ModelConfig config);
  const ModelConfig& config() const { return config_; }  ///< the constructor's

  /// Returns the mean cross-entropy over the targets that are not kIgnoreIndex: an f64 scalar. tokens and targets: i32
  /// [batch, position]. It uses the call operator, so the root's hooks enclose the whole computation.
  Tensor loss(const Tensor& tokens, const Tensor& targets) { return (*this)(tokens, targets); }
  Tensor forward(const Tensor& tokens, const Tensor& targets);  ///< called by loss(), between the root's hooks

 protected:
  /// The hidden states after the last norm, [batch, position, width].
  virtual Tensor hidden(const Tensor& tokens) = 0;
  /// The head: [..., width] -> [..., vocabulary].
  virtual Tensor logits(const Tensor& hidden) = 0;
  /// The mean cross-entropy of the targets. By default that of logits(hidden), which it overwrites in backward; a model
  /// with an LmHead calls its head, which pads its logits.
  virtual Tensor mean_loss(const Tensor& hidden, const Tensor& targets);

 private:
  const ModelConfig config_;
};

/// Validates the config; throws InvalidUsage. Parameters get no memory; see Module::materialize.
TESSERA_API std::unique_ptr<CausalModel> make_model(Context& context, const ModelConfig& config);

}  // namespace tessera::nn
