// A model of your own in the tool, whose commands run it as they run theirs:
//   tessera compare --model build/model.so:counter --ranks 4
//   tessera train --model build/model.so:counter,width=96,blocks=6 --strategy fsdp --ranks 4 --save run
//   tessera plan --model build/model.so:counter --ranks 64
#include "tessera/fsdp/nn_task.h"
#include "tessera/fsdp/plugin.h"
#include "tessera/nn/layers/attention.h"
#include "tessera/nn/layers/embedding.h"
#include "tessera/nn/layers/linear.h"
#include "tessera/nn/layers/norm.h"
#include "tessera/nn/ops/activation.h"
#include "tessera/nn/ops/arithmetic.h"
#include "tessera/nn/ops/cross_entropy.h"

using namespace tessera;
using nn::Tensor;

constexpr std::int64_t kVocabulary = 101, kPositions = 24, kEvaluationStep = -1;

class Block : public nn::Layer<Block> {
 public:
  Block(nn::Context& context, std::int64_t width) : Layer(context), width_(width) { mark_block(); }  // a unit
  Tensor forward(const Tensor& x) {
    const Tensor y = x + attention_(norm_1_(x));
    return y + down_(nn::ops::relu(up_(norm_2_(y))));
  }

 private:
  const std::int64_t width_;
  nn::LayerNorm& norm_1_ = add<nn::LayerNorm>("norm_1", nn::NormOptions{width_});
  nn::SelfAttention& attention_ = add<nn::SelfAttention>("attention", nn::SelfAttentionOptions{width_, 4});
  nn::LayerNorm& norm_2_ = add<nn::LayerNorm>("norm_2", nn::NormOptions{width_});
  nn::Linear& up_ = add<nn::Linear>("up", nn::LinearOptions{width_, 4 * width_});
  nn::Linear& down_ = add<nn::Linear>("down", nn::LinearOptions{4 * width_, width_});
};

class Counter : public nn::Layer<Counter> {
 public:
  Counter(nn::Context& context, std::int64_t width, std::int64_t blocks) : Layer(context), width_(width) {
    for (std::int64_t i = 0; i < blocks; ++i) blocks_.push_back(&add<Block>("blocks." + std::to_string(i), width));
  }
  Tensor forward(const Tensor& tokens, const Tensor& targets) {
    Tensor x = tokens_(tokens);
    for (Block* block : blocks_) x = (*block)(x);
    return nn::ops::cross_entropy(head_(norm_(x)), targets);
  }

 private:
  const std::int64_t width_;
  nn::Embedding& tokens_ = add<nn::Embedding>("tokens", nn::EmbeddingOptions{kVocabulary, width_});
  std::vector<Block*> blocks_;
  nn::LayerNorm& norm_ = add<nn::LayerNorm>("norm", nn::NormOptions{width_});
  nn::Linear& head_ = add<nn::Linear>("head", nn::LinearOptions{width_, kVocabulary, false});
};

/// The model and its data: sequences that count in threes, modulo the vocabulary.
class CounterTask : public fsdp::NnTask {
 public:
  explicit CounterTask(const fsdp::TaskSetup& setup)
      : NnTask(std::make_unique<Counter>(fsdp::nn_context(setup.runtime), setup.options.integer("width", 48),
                                         setup.options.integer("blocks", 3, 1, 1000)),
               setup.seed),
        evaluation_samples_(setup.options.integer("eval", 0, 0)) {}
  std::int64_t tokens_per_sample() const override { return kPositions; }
  std::int64_t evaluation_samples() const override { return evaluation_samples_; }  // --eval 64

 protected:
  Tensor evaluation(base::ElementRange samples) override { return loss(kEvaluationStep, samples); }
  // A sample is the same whichever rank computes it, so all strategies and numbers of ranks train on the same data.
  Tensor loss(std::int64_t step, base::ElementRange samples) override {
    std::vector<int> tokens, targets;
    for (std::int64_t sample = samples.begin; sample < samples.end; ++sample)
      for (std::int64_t position = 0; position < kPositions; ++position) {
        tokens.push_back(static_cast<int>((29 * (step + 1) + 13 * sample + 3 * position) % kVocabulary));
        targets.push_back((tokens.back() + 3) % static_cast<int>(kVocabulary));
      }
    return module_as<Counter>()(Tensor::from(context(), tokens, {samples.count(), kPositions}),
                                Tensor::from(context(), targets, {samples.count(), kPositions}));
  }

 private:
  const std::int64_t evaluation_samples_;
};

fsdp::PluginExports exports() {
  return {.tasks = {{"counter", [](const fsdp::TaskSetup& setup) { return std::make_unique<CounterTask>(setup); }}}};
}
TESSERA_FSDP_PLUGIN(exports)
