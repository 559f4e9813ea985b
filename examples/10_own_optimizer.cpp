// An optimizer of the program's own under any strategy: Lion (Chen et al., arXiv 2302.06675). The engine hands it this
// rank's shards, clips, and saves its state with checkpoints.
#include <cmath>
#include <cstdio>
#include <cstring>

#include "tessera/comm/init.h"
#include "tessera/fsdp/nn_model.h"
#include "tessera/nn/models/causal_model.h"
using namespace tessera;

namespace {

/// Appends the update of one shard to `stream`.
void lion(base::Stream& stream, const fsdp::OptimizerShard& shard, const base::OptimizerStep& step) {
  constexpr float kBeta1 = 0.9F, kBeta2 = 0.99F, kDecay = 0.1F;
  stream.run([=, values = shard.values, momentum = shard.state[0], count = shard.range.count(),
              decay = shard.parameter.decays() ? kDecay : 0.0F,
              gradients = static_cast<const float*>(shard.gradients)] {
    const auto scale = static_cast<float>(step.gradient_scale != nullptr ? *step.gradient_scale : 1);  // of clipping
    const auto rate = static_cast<float>(step.learning_rate);
    for (std::int64_t i = 0; i < count; ++i) {
      const float gradient = gradients[i] * scale;
      const float direction = kBeta1 * momentum[i] + (1 - kBeta1) * gradient;
      const float sign = static_cast<float>(direction > 0) - static_cast<float>(direction < 0);
      momentum[i] = kBeta2 * momentum[i] + (1 - kBeta2) * gradient;
      values[i] -= rate * (sign + decay * values[i]);
    }
  });
}

/// Trains three steps and returns the last loss.
float train(comm::Communicator& world, const char* strategy) {
  nn::Context context;
  const auto model = nn::make_model(context, nn::preset("gpt-nano"));
  const fsdp::ProgramOptimizer optimizer{
      .slots = 1, .update = [&](const auto& shard, const auto& step) { lion(context.stream(), shard, step); }};
  fsdp::Engine engine(*model, world,
                      {.strategy = fsdp::strategy_named(strategy), .program_optimizer = optimizer, .clip_norm = 1});
  engine.initialize(/*seed=*/0);
  const nn::Tensor tokens = nn::Tensor::zeros(context, {2, 16}, base::DType::i32);
  float last = 0;
  for (int step = 1; step <= 3; ++step) {
    const nn::TapeScope recording(context);
    const nn::Tensor loss = model->loss(tokens, tokens);
    loss.backward();
    engine.step(/*learning_rate=*/1e-3);
    last = static_cast<float>(loss.item());
    if (world.rank() == 0) std::printf("%s: step %d loss %.3f\n", strategy, step, last);
  }
  return last;
}

}  // namespace

int main() {
  const auto world = comm::init();
  const float ddp = train(*world, "ddp");
  const float sharded = train(*world, "fsdp");
  if (world->rank() == 0)
    std::printf("the losses %s\n", std::memcmp(&ddp, &sharded, sizeof(ddp)) == 0 ? "have the same bits" : "differ");
}
