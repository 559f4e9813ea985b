// The output head, with its own weight or the token embedding's.
#pragma once

#include "tessera/nn/layers/embedding.h"
#include "tessera/nn/ops/cross_entropy.h"
#include "tessera/nn/ops/linear.h"

namespace tessera::nn {

/// logits[..., vocabulary] = x[..., width] * W^T. Tied: the parameter is the embedding's, under the embedding's name.
/// If the head has its own dtype, logits stay in it.
class TESSERA_API LmHead : public Layer<LmHead> {
 public:
  /// Ties to `embedding`'s weight if `tied`, else creates a weight of the same shape.
  LmHead(Context& context, const Embedding& embedding, bool tied, double deviation)
      : Layer(context),
        weight_(tied ? tie_parameter(embedding.weight(), embedding)
                     : add_parameter("weight", embedding.weight().shape(), Init::normal(deviation))) {
    set_cast_outputs(false);
  }
  /// Logits in the head's dtype.
  Tensor forward(const Tensor& x) { return ops::linear(x, weight_.tensor()); }
  /// The mean cross-entropy of the logits, as ops::cross_entropy(). The logits exist only inside the head, which pads
  /// their rows in memory as the device prefers (50257 tokens make rows that no product or kernel can load by 16
  /// bytes). The weight needs no padding: its rows, of `width` elements, are whole vectors.
  Tensor forward(const Tensor& x, const Tensor& targets) {
    return ops::cross_entropy(ops::padded_linear(x, weight_.tensor()), targets,
                              {.overwrite_logits = true, .vocabulary = weight_.shape().front()});
  }

 private:
  Parameter& weight_;
};

}  // namespace tessera::nn
