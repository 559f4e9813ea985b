// The transformer that articles on FSDP shard: post-norm blocks with bidirectional attention and ReLU, and a head with
// a bias. Strategy and wrapping are arguments; compare what they change in units, memory and bytes.
//   tessera run -n 4 -- ./09_big_model fsdp block      (or ddp, zero1, zero2, hsdp; none, size:20000, type:Linear)

#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "tessera/comm/init.h"
#include "tessera/fsdp/nn_model.h"
#include "tessera/nn/layers/attention.h"
#include "tessera/nn/layers/embedding.h"
#include "tessera/nn/layers/norm.h"
#include "tessera/nn/layers/sequential.h"
#include "tessera/nn/ops/activation.h"
#include "tessera/nn/ops/arithmetic.h"
#include "tessera/nn/ops/cross_entropy.h"

using namespace tessera;
using nn::Tensor;

constexpr std::int64_t kWidth = 64, kHeads = 4, kVocabulary = 128, kBlocks = 6, kBatch = 8, kPositions = 32;

class Block : public nn::Layer<Block> {
 public:
  explicit Block(nn::Context& context) : Layer(context) {
    mark_block();  // what wrap "block" makes a unit of
    feed_forward_.append<nn::Linear>(nn::LinearOptions{kWidth, 4 * kWidth})
        .append(nn::ops::relu)
        .append<nn::Linear>(nn::LinearOptions{4 * kWidth, kWidth});
  }
  Tensor forward(const Tensor& x) {
    const Tensor y = norm_1_(x + attention_(x));
    return norm_2_(y + feed_forward_(y));
  }

 private:
  nn::SelfAttention& attention_ =
      add<nn::SelfAttention>("attention", nn::SelfAttentionOptions{.width = kWidth, .heads = kHeads, .causal = false});
  nn::LayerNorm& norm_1_ = add<nn::LayerNorm>("norm_1", nn::NormOptions{kWidth});
  nn::Sequential& feed_forward_ = add<nn::Sequential>("feed_forward");
  nn::LayerNorm& norm_2_ = add<nn::LayerNorm>("norm_2", nn::NormOptions{kWidth});
};

class BigModel : public nn::Layer<BigModel> {
 public:
  explicit BigModel(nn::Context& context) : Layer(context) {
    for (std::int64_t i = 0; i < kBlocks; ++i) blocks_.append<Block>();
  }
  Tensor forward(const Tensor& tokens, const Tensor& targets) {
    return nn::ops::cross_entropy(head_(blocks_(embedding_(tokens))), targets);
  }

 private:
  nn::Embedding& embedding_ = add<nn::Embedding>("embedding", nn::EmbeddingOptions{kVocabulary, kWidth});
  nn::Sequential& blocks_ = add<nn::Sequential>("blocks");
  nn::Linear& head_ = add<nn::Linear>("head", nn::LinearOptions{kWidth, kVocabulary});
};

int main(int argc, char** argv) {
  const auto world = comm::init();
  nn::Context context({.threads = 1, .memory_tracker = world->memory_tracker()});  // counts communication buffers, too
  BigModel model(context);
  fsdp::Engine engine(
      model, *world,
      {.strategy = fsdp::strategy_named(argc > 1 ? argv[1] : "fsdp"), .wrap = argc > 2 ? argv[2] : "block"});
  engine.initialize(/*seed=*/0);

  constexpr int kSteps = 20;
  std::vector<int> tokens(kBatch * kPositions), targets(tokens.size());
  double loss = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (int step = 0; step < kSteps; ++step) {
    for (int i = 0; i < kBatch * kPositions; ++i) {
      tokens[i] = (31 * step + 17 * world->rank() + 5 * i) % kVocabulary;
      targets[i] = (tokens[i] + 1) % kVocabulary;
    }
    const nn::TapeScope recording(context);
    const Tensor mean = model(Tensor::from(context, tokens, {kBatch, kPositions}),  //
                              Tensor::from(context, targets, {kBatch, kPositions}));
    mean.backward();
    engine.step(3e-3);
    loss = mean.item();
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  if (world->rank() != 0) return 0;
  const fsdp::EngineTraffic sent = engine.stats().traffic();
  const auto total = sent.all_gather.bytes_sent + sent.reduce_scatter.bytes_sent + sent.all_reduce.bytes_sent;
  std::printf("loss %.2f, %zu units, peak %.2f MB, %.2f MB sent per step\n", loss, engine.stats().units().size(),
              static_cast<double>(context.memory_tracker().snapshot().total_peak) / 1e6,
              static_cast<double>(total) / kSteps / 1e6);
  std::fprintf(stderr, "%.0f tokens/s\n", kSteps * kBatch * kPositions * world->size() / seconds.count());
}
