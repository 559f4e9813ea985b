// One process, no engine: a tiny GPT learns to count.  ./03_train_alone
#include <cstdio>

#include "tessera/nn/models/causal_model.h"
#include "tessera/nn/optimizer.h"

using namespace tessera;

int main() {
  nn::Context context({.threads = 1});
  const auto model = nn::make_model(context, nn::preset("gpt-nano"));
  model->materialize(/*seed=*/0);
  nn::Optimizer optimizer(*model, {});  // AdamW

  const nn::Shape shape = {8, 32};
  const nn::Tensor tokens = nn::Tensor::empty(context, shape, base::DType::i32);
  const nn::Tensor targets = nn::Tensor::empty(context, shape, base::DType::i32);
  for (int step = 0; step < 30; ++step) {
    for (int i = 0; i < 8 * 32; ++i) {
      tokens.data<int>()[i] = (37 * step + 11 * (i / 32) + i) % 100;
      targets.data<int>()[i] = (tokens.data<int>()[i] + 1) % 100;
    }
    nn::Tape tape;
    nn::Tensor loss;
    {
      const nn::TapeScope recording(context, &tape);
      loss = model->loss(tokens, targets);
    }
    tape.backward(loss);
    optimizer.step(3e-3);
    if (step % 10 == 9) std::printf("step %d loss %.2f\n", step + 1, loss.item());
  }
}
