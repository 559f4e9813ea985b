#include <cstdio>

#include "tessera/comm/init.h"
#include "tessera/fsdp/nn_model.h"
#include "tessera/nn/models/causal_model.h"
using namespace tessera;

int main() {
  const auto world = comm::init();  // the launcher sets rank and size
  nn::Context context;
  const auto model = nn::make_model(context, nn::preset("gpt-nano"));
  // Or ddp(), zero1(), zero2(), hsdp().
  fsdp::Engine engine(*model, *world, {.strategy = fsdp::strategies::fsdp()});
  engine.initialize(/*seed=*/0);  // each rank fills only its own shard
  const nn::Tensor tokens = nn::Tensor::zeros(context, {2, 16}, base::DType::i32);
  for (int step = 1; step <= 3; ++step) {
    const nn::TapeScope recording(context);
    const nn::Tensor loss = model->loss(tokens, tokens);
    loss.backward();
    engine.step(/*learning_rate=*/1e-3);
    if (world->rank() == 0) std::printf("step %d loss %.3f\n", step, loss.item());
  }
}
