// The program's own optimizer against the engine's: a program that calls the same update for each shard ends with the
// same bits, whatever the precision, the loss scale, the place of the state and the parameters that are trained.
#include <array>
#include <atomic>
#include <cmath>

#include "tests/fsdp/training_specs.h"

namespace tessera::fsdp {
namespace {

using base::DType;
using harness::same_bits;
using harness::train;
using harness::TrainingRecord;

thread_local Runtime* runtime_of_rank = nullptr;

/// The engine's AdamW, called by the program. `scaled`: whether it multiplies gradients as OptimizerStep says.
ProgramOptimizer adamw(bool scaled = true) {
  return {.slots = 2, .update = [scaled](const OptimizerShard& shard, const base::OptimizerStep& step) {
            base::OptimizerRange range{.values = shard.values,
                                       .state = shard.state,
                                       .count = shard.range.count(),
                                       .decay = shard.parameter.decays()};
            if (shard.gradient_dtype == DType::f32) {
              range.gradients = static_cast<const float*>(shard.gradients);
            } else {
              range.half = {shard.gradient_dtype, shard.gradients, nullptr};
            }
            base::OptimizerStep own = step;
            if (!scaled) own.gradient_scale = nullptr;
            runtime_of_rank->update({}, own, range);
          }};
}

/// The same training with the engine's optimizer, and with the program's.
TrainingRecord trained(TrainingSpec spec, std::optional<ProgramOptimizer> program = {}) {
  spec.engine.program_optimizer = std::move(program);
  spec.before_training = [](Engine& engine, comm::Communicator&) { runtime_of_rank = &engine.model().runtime(); };
  return train(spec);
}

void expect_equal(const TrainingSpec& spec) {
  const TrainingRecord engines = trained(spec), programs = trained(spec, adamw());
  EXPECT_TRUE(same_bits(engines, programs));
  EXPECT_EQ(engines.model_state, programs.model_state);
}

TEST(ProgramOptimizerTest, EqualsEnginesInHalfPrecision) {
  for (const char* strategy : {"ddp", "zero2", "fsdp"})
    for (const auto reduce : {std::optional<DType>(), std::optional(DType::f32)}) {
      SCOPED_TRACE(std::string(strategy) + (reduce ? " reducing f32" : " reducing bf16"));
      expect_equal(
          base_spec(strategy, 2, {.layers = 2, .clip_norm = 0.5, .dtype = DType::bf16, .reduce_dtype = reduce}));
    }
}

TEST(ProgramOptimizerTest, ThatIgnoresTheScaleOfClippingDiffers) {  // the control
  const TrainingSpec spec = base_spec("fsdp", 2, {.layers = 2, .clip_norm = 0.01, .dtype = DType::bf16});
  EXPECT_FALSE(same_bits(trained(spec), trained(spec, adamw(false))));
}

/// The second of three steps has an infinite gradient on one rank: it changes nothing, and is not counted.
TEST(ProgramOptimizerTest, EqualsEnginesWithLossScale) {
  for (const char* strategy : {"ddp", "fsdp"}) {
    SCOPED_TRACE(strategy);
    TrainingSpec spec = base_spec(strategy, 2, {.layers = 2, .dtype = DType::f16});
    spec.engine.use_loss_scaling = true;
    std::array<std::atomic<bool>, 2> skipped = {};
    spec.after_backward = [](int, int step, Engine& engine, nn::CausalModel&) {
      if (step != 1) return;
      engine.for_each_gradient([](const GradientShard& gradient) {
        if (gradient.parameter.name() == "h.1.mlp.c_fc.weight" && gradient.range.begin == 0)
          *static_cast<nn::f16*>(gradient.data) = nn::f16(INFINITY);
      });
    };
    spec.after_step = [&](int rank, int step, Engine& engine, nn::CausalModel&) {
      if (step != 1) return;
      skipped[static_cast<std::size_t>(rank)] = !std::isfinite(engine.grad_norm());
      engine.state().set_steps(engine.steps(), 1);  // as a GradientScaler counts
    };
    expect_equal(spec);
    EXPECT_TRUE(skipped[0] && skipped[1]);
  }
}

/// Several chunks for each unit, at odd offsets, so parts of a parameter reach the program.
TEST(ProgramOptimizerTest, EqualsEnginesWithCpuOffload) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    TrainingSpec spec = base_spec("fsdp", 2, {.layers = 2, .clip_norm = 0.5, .dtype = dtype});
    spec.engine.cpu_offload = true;
    spec.engine.offload_chunk_elements = 5001;
    spec.runtime = harness::make_guarded_device({.lazy = true});
    expect_equal(spec);
  }
}

/// Parameters that are unfrozen after two steps begin with state of zeros and with the first step's bias correction.
TEST(ProgramOptimizerTest, EqualsEnginesWhenParametersAreUnfrozen) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    TrainingSpec spec = base_spec("fsdp", 2, {.layers = 2, .dtype = dtype});
    spec.steps = 4;
    spec.after_step = [](int, int step, Engine& engine, nn::CausalModel& model) {
      if (step > 1) return;
      for (const auto& parameter : model.parameters()) {
        nn::Tensor tensor = parameter->tensor();
        if (parameter->name().find("mlp") != std::string::npos) tensor.set_requires_grad(step == 1);
      }
      engine.apply_requires_grad();
    };
    expect_equal(spec);
  }
}

}  // namespace
}  // namespace tessera::fsdp
