// The model of assignments 2 and 4: an embedding, blocks, and a head, of sizes that few numbers of ranks divide.
#pragma once

#include <string>
#include <vector>

#include "tessera/nn/layers/embedding.h"
#include "tessera/nn/layers/linear.h"
#include "tessera/nn/layers/norm.h"
#include "tessera/nn/ops/activation.h"
#include "tessera/nn/ops/arithmetic.h"
#include "tessera/nn/ops/cross_entropy.h"

namespace grading {

inline constexpr std::int64_t kVocabulary = 131, kWidth = 24, kHidden = 121, kBlocks = 3, kSequences = 2,
                              kPositions = 6;

class Embed : public tessera::nn::Layer<Embed> {
 public:
  using Layer::Layer;
  tessera::nn::Tensor forward(const tessera::nn::Tensor& tokens) { return tokens_(tokens); }

 private:
  tessera::nn::Embedding& tokens_ =
      add<tessera::nn::Embedding>("tokens", tessera::nn::EmbeddingOptions{kVocabulary, kWidth});
};

class Block : public tessera::nn::Layer<Block> {
 public:
  using Layer::Layer;
  tessera::nn::Tensor forward(const tessera::nn::Tensor& x) { return x + down_(tessera::nn::ops::relu(up_(x))); }

 private:
  tessera::nn::Linear& up_ = add<tessera::nn::Linear>("up", tessera::nn::LinearOptions{kWidth, kHidden});
  tessera::nn::Linear& down_ = add<tessera::nn::Linear>("down", tessera::nn::LinearOptions{kHidden, kWidth});
};

class Head : public tessera::nn::Layer<Head> {
 public:
  using Layer::Layer;
  tessera::nn::Tensor forward(const tessera::nn::Tensor& x) { return out_(norm_(x)); }

 private:
  tessera::nn::LayerNorm& norm_ = add<tessera::nn::LayerNorm>("norm", tessera::nn::NormOptions{kWidth});
  tessera::nn::Linear& out_ = add<tessera::nn::Linear>("out", tessera::nn::LinearOptions{kWidth, kVocabulary, false});
};

class Model : public tessera::nn::Layer<Model> {
 public:
  using Layer::Layer;
  tessera::nn::Tensor forward(const tessera::nn::Tensor& tokens, const tessera::nn::Tensor& targets) {
    tessera::nn::Tensor x = embed_(tokens);
    for (std::size_t i = 0; i < blocks_.size(); ++i)
      if (i != skipped_) x = (*blocks_[i])(x);
    return tessera::nn::ops::cross_entropy(head_(x), targets);
  }
  void skip_block(std::size_t block) { skipped_ = block; }  ///< leaves it out of the forwards that follow

 private:
  std::size_t skipped_ = kBlocks;
  Embed& embed_ = add<Embed>("embed");
  std::vector<Block*> blocks_ = {&add<Block>("block0"), &add<Block>("block1"), &add<Block>("block2")};
  Head& head_ = add<Head>("head");
};

/// Tokens and the token after each, for a step of a rank.
struct Batch {
  tessera::nn::Tensor tokens, targets;
};
Batch batch_of(tessera::nn::Context& context, int step, int rank);

}  // namespace grading
