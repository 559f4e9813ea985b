// One process, no engine: a tiny GPT learns to count.  ./03_train_alone
#include <array>
#include <cstdio>

#include "tessera/nn/models/causal_model.h"
#include "tessera/nn/optimizer.h"

using namespace tessera;

int main() {
  nn::Context context({.threads = 1});
  const auto model = nn::make_model(context, nn::preset("gpt-nano"));
  model->materialize(/*seed=*/0);
  nn::Optimizer optimizer(*model, {});  // AdamW

  std::array<int, 8 * 32> tokens = {}, targets = {};
  for (int step = 0; step < 30; ++step) {
    for (int i = 0; i < 8 * 32; ++i) {
      tokens[i] = (37 * step + 11 * (i / 32) + i) % 100;
      targets[i] = (tokens[i] + 1) % 100;
    }
    const nn::TapeScope recording(context);
    const nn::Tensor loss =
        model->loss(nn::Tensor::from(context, tokens, {8, 32}), nn::Tensor::from(context, targets, {8, 32}));
    loss.backward();
    optimizer.step(3e-3);
    if (step % 10 == 9) std::printf("step %d loss %.2f\n", step + 1, loss.item());
  }
}
