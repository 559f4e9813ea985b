#include "tessera/nn/layers/embedding.h"

#include "tessera/nn/ops/embedding.h"

namespace tessera::nn {

Embedding::Embedding(Context& context, const EmbeddingOptions& options)
    : Layer(context),
      weight_(add_parameter("weight", {options.rows, options.width}, Init::normal(options.deviation))) {}

Tensor Embedding::forward(const Tensor& ids) { return ops::embedding(ids, weight_.tensor()); }

}  // namespace tessera::nn
