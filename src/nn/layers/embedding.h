// An embedding table.
#pragma once

#include "tessera/nn/module.h"

namespace tessera::nn {

/// Settings of Embedding.
struct EmbeddingOptions {
  std::int64_t rows = 0;    ///< number of ids
  std::int64_t width = 0;   ///< elements of a vector
  double deviation = 0.02;  ///< deviation of the normal initial weights
};

/// y[..., width] = weight[ids[...], :]. Parameter: weight [rows, width].
class TESSERA_API Embedding : public Layer<Embedding> {
 public:
  /// Parameters get no memory; see Module::materialize().
  Embedding(Context& context, const EmbeddingOptions& options);
  Tensor forward(const Tensor& ids);                   ///< `ids`: i32 in [0, rows), of any shape
  const Parameter& weight() const { return weight_; }  ///< weight, for tying; see LmHead

 private:
  Parameter& weight_;
};

}  // namespace tessera::nn
