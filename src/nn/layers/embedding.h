// An embedding table.
#pragma once

#include "tessera/nn/module.h"

namespace tessera::nn {

struct EmbeddingOptions {
  std::int64_t rows = 0;
  std::int64_t width = 0;
  double deviation = 0.02;
};

/// y[..., width] = weight[ids[...], :]. Parameter: weight [rows, width].
class TESSERA_API Embedding : public Layer<Embedding> {
 public:
  Embedding(Context& context, const EmbeddingOptions& options);
  Tensor forward(const Tensor& ids);
  const Parameter& weight() const { return weight_; }

 private:
  Parameter& weight_;
};

}  // namespace tessera::nn
