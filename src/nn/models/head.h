// The output head, with a matrix of its own or the token embedding's.
#pragma once

#include "tessera/nn/layers/embedding.h"
#include "tessera/nn/ops/linear.h"

namespace tessera::nn {

/// logits[..., vocabulary] = x[..., width] * W^T. Tied: the parameter is the embedding's, under the embedding's name.
/// With a dtype of its own, logits stay in that.
class TESSERA_API LmHead : public Layer<LmHead> {
 public:
  /// Ties to `embedding`'s weight where `tied`, else makes a weight of the same shape.
  LmHead(Context& context, const Embedding& embedding, bool tied, double deviation)
      : Layer(context),
        weight_(tied ? tie_parameter(embedding.weight(), embedding)
                     : add_parameter("weight", embedding.weight().shape(), Init::normal(deviation))) {
    set_cast_outputs(false);
  }
  Tensor forward(const Tensor& x) { return ops::linear(x, weight_.tensor()); }

 private:
  Parameter& weight_;
};

}  // namespace tessera::nn
