// How many kernels a step of a GPT-2 launches on CUDA, emulated. Matrix products, copies and clears are not counted.
#include <gtest/gtest.h>

#include "tests/fsdp/training_specs.h"
#include "tests/harness/guarded_device.h"
#include "tests/nn/ops/cuda/emulated_kernels.h"

namespace tessera::fsdp {
namespace {

struct Launches {
  std::size_t forward = 0, backward = 0, update = 0;
  std::size_t units = 0;
};

/// Of rank 0 in the second step of a GPT-2 with `layers` layers, with AdamW and clipping.
Launches launches_of(int layers, base::DType dtype, const std::string& strategy = "fsdp", int ranks = 1) {
  TrainingSpec spec = base_spec(strategy, ranks, {.layers = layers, .clip_norm = 0.5});
  spec.engine.optimizer.kind = nn::OptimizerConfig::Kind::adamw;
  spec.global_batch = 2 * ranks;
  comm::InitOptions config;
  config.backend = "shm";
  config.device = harness::make_guarded_device({.kernels = nn::test::make_emulated_kernels});
  Launches found;
  comm::run_threads(ranks, config, [&](comm::Communicator& world) {
    nn::Context context({.memory_tracker = world.memory_tracker(), .runtime = config.device});
    const auto model = nn::make_model(context, spec.model);
    model->set_dtype(dtype);
    Engine engine(*model, world, spec.engine);
    engine.initialize(0);
    for (int step = 0; step < 2; ++step) {
      const harness::TokenBatch batch = harness::make_batch(context, spec, step, world.rank());
      nn::Tape tape;
      nn::Tensor loss;
      const std::size_t start = nn::test::kernel_launches();
      {
        const nn::TapeScope recording(context, &tape);
        loss = model->loss(batch.tokens, batch.targets);
      }
      const std::size_t computed = nn::test::kernel_launches();
      tape.backward(loss);
      const std::size_t differentiated = nn::test::kernel_launches();
      engine.step(1e-3);
      if (world.rank() > 0) continue;
      found = {computed - start, differentiated - computed, nn::test::kernel_launches() - differentiated,
               engine.stats().units().size()};
    }
    engine.wait();
  });
  return found;
}

TEST(Launches, UpdateOfAUnitIsOne) {
  for (const base::DType dtype : {base::DType::f32, base::DType::bf16})
    for (const int layers : {1, 3}) {
      const Launches found = launches_of(layers, dtype);
      EXPECT_EQ(found.units, static_cast<std::size_t>(layers) + 1);
      EXPECT_EQ(found.update, found.units + 1) << "and the clipping factor";
    }
}

/// A rank of ddp computes the partial norms of all ranks' slices.
TEST(Launches, NormOfAUnitIsOneForAnyNumberOfSlices) {
  const Launches one = launches_of(1, base::DType::f32, "ddp", 1), three = launches_of(1, base::DType::f32, "ddp", 3);
  EXPECT_EQ(three.backward + three.update, one.backward + one.update) << "the last reduction ends in the update";
}

/// Of a layer: both norms, attention, and a residual sum; the other sum is in the second norm's launch. Backward: two
/// launches for each norm, two for attention (three in f32), GELU, and one for the norm of the unit's gradient. bf16
/// products include biases, GELU and bias gradients as cuBLASLt does; the f32 products of this test include nothing.
TEST(Launches, OfALayer) {
  for (const base::DType dtype : {base::DType::f32, base::DType::bf16}) {
    const bool epilogues = dtype == base::DType::bf16;
    const Launches one = launches_of(1, dtype), three = launches_of(3, dtype);
    EXPECT_EQ(three.forward - one.forward, 2U * (epilogues ? 4 : 4 + 5));
    EXPECT_EQ(three.backward - one.backward, 2U * (epilogues ? 8 : 9 + 8));
  }
}

}  // namespace
}  // namespace tessera::fsdp
