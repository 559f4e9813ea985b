// A custom model under FSDP: embedding, blocks of attention, feed-forward with ReLU and layer norms, an output head.
// The same program trains alone or sharded:  ./04_own_model_fsdp   or   tessera run -n 2 -- ./04_own_model_fsdp

#include "tessera/comm/init.h"
#include "tessera/fsdp/nn_model.h"
#include "tessera/nn/layers/attention.h"
#include "tessera/nn/layers/embedding.h"
#include "tessera/nn/layers/linear.h"
#include "tessera/nn/layers/norm.h"
#include "tessera/nn/ops/activation.h"
#include "tessera/nn/ops/arithmetic.h"
#include "tessera/nn/ops/cross_entropy.h"

using namespace tessera;
using nn::Tensor;

constexpr std::int64_t kWidth = 48, kHeads = 4, kVocabulary = 101;

class Block : public nn::Layer<Block> {
 public:
  explicit Block(nn::Context& context) : Layer(context) { mark_block(); }  // a block is an FSDP unit
  Tensor forward(const Tensor& x) {
    const Tensor y = x + attention_(norm_1_(x));
    return y + down_(nn::ops::relu(up_(norm_2_(y))));
  }

 private:
  nn::LayerNorm& norm_1_ = add<nn::LayerNorm>("norm_1", nn::NormOptions{kWidth});
  nn::SelfAttention& attention_ = add<nn::SelfAttention>("attention", nn::SelfAttentionOptions{kWidth, kHeads});
  nn::LayerNorm& norm_2_ = add<nn::LayerNorm>("norm_2", nn::NormOptions{kWidth});
  nn::Linear& up_ = add<nn::Linear>("up", nn::LinearOptions{kWidth, 4 * kWidth});
  nn::Linear& down_ = add<nn::Linear>("down", nn::LinearOptions{4 * kWidth, kWidth});
};

class Model : public nn::Layer<Model> {
 public:
  using Layer::Layer;
  Tensor forward(const Tensor& tokens, const Tensor& targets) {
    Tensor x = tokens_(tokens);
    for (Block* block : blocks_) x = (*block)(x);
    return nn::ops::cross_entropy(head_(norm_(x)), targets);
  }

 private:
  nn::Embedding& tokens_ = add<nn::Embedding>("tokens", nn::EmbeddingOptions{kVocabulary, kWidth});
  std::vector<Block*> blocks_ = {&add<Block>("blocks.0"), &add<Block>("blocks.1"), &add<Block>("blocks.2")};
  nn::LayerNorm& norm_ = add<nn::LayerNorm>("norm", nn::NormOptions{kWidth});
  nn::Linear& head_ = add<nn::Linear>("head", nn::LinearOptions{kWidth, kVocabulary, false});
};

int main() {
  const auto world = comm::init();
  nn::Context context;
  Model model(context);
  fsdp::Engine engine(model, *world, {.strategy = fsdp::strategies::fsdp()});
  engine.initialize(/*seed=*/0);

  const std::int64_t global_batch = 8, positions = 24, mine = global_batch / world->size();
  std::vector<int> tokens(mine * positions), targets(mine * positions);
  for (int step = 0; step < 40; ++step) {
    for (std::int64_t i = 0; i < mine * positions; ++i) {
      const std::int64_t sequence = i / positions + mine * world->rank();  // each rank takes its slice of the batch
      tokens[i] = static_cast<int>((29 * step + 13 * sequence + 3 * i) % kVocabulary);
      targets[i] = static_cast<int>((tokens[i] + 3) % kVocabulary);
    }
    const nn::TapeScope recording(context);
    const Tensor loss = model(Tensor::from(context, tokens, {mine, positions}),  //
                              Tensor::from(context, targets, {mine, positions}));
    loss.backward();
    engine.step(3e-3);
    double mean = loss.item();
    const comm::View view = comm::view_of(&mean, 1);
    world->all_reduce(view, view, comm::ReduceOp::avg()).wait();
    if (world->rank() == 0 && step % 10 == 9) std::printf("step %d loss %.2f\n", step + 1, mean);
  }
}
