// Gradients by name before a step, and values set by a rank or a program.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <mutex>

#include "tests/fsdp/training_specs.h"

namespace tessera::fsdp {
namespace {

using base::DType;
using base::MemoryCategory;
using harness::train;
using harness::TrainingRecord;

// --- gradients by name

/// With plain SGD a parameter whose gradient is overwritten changes by exactly that gradient.
TEST(Gradients, AreReadAndWrittenByNameBeforeStep) {
  for (const char* name : kStrategies) {
    TrainingSpec spec = five_step_spec(name, 2);
    spec.engine.optimizer.kind = nn::OptimizerConfig::Kind::sgd;
    spec.engine.optimizer.weight_decay = 0;
    spec.steps = 1;
    spec.lr = 0.5;
    spec.engine.norm = nn::kernels::Norm::infinity;
    Values before, after, seen;
    std::mutex mutex;
    spec.before_training = [&](Engine& engine, comm::Communicator& control) {
      const Values values = values_of(engine);
      if (control.rank() == 0) before = values;
    };
    spec.after_backward = [&](int, int, Engine& engine, nn::CausalModel&) {
      engine.for_each_gradient([&](const GradientShard& gradient) {
        auto* values = static_cast<float*>(gradient.data);
        const std::lock_guard lock(mutex);
        std::vector<float>& whole = seen[gradient.parameter.name()];
        whole.resize(static_cast<std::size_t>(gradient.parameter.count()));
        if (gradient.parameter.name() == "h.0.mlp.c_fc.weight") std::fill_n(values, gradient.range.count(), 1000.0F);
        std::copy_n(values, gradient.range.count(), whole.begin() + gradient.range.begin);
      });
    };
    spec.after_step = [&](int rank, int, Engine& engine, nn::CausalModel&) {
      const Values values = values_of(engine);
      if (rank == 0) after = values;
    };
    const TrainingRecord record = train(spec);
    EXPECT_EQ(record.norms[0], 1000.0) << name;  // the norm of the overwritten gradients
    EXPECT_EQ(seen.size(), before.size());
    for (const auto& [parameter, values] : after)
      for (std::size_t i = 0; i < values.size(); i += 7)
        EXPECT_EQ(values[i], std::fma(-0.5F, seen.at(parameter)[i], before.at(parameter)[i])) << name << parameter;
  }
}

TEST(Gradients, ExistBetweenBackwardAndStepOnly) {
  TrainingSpec spec = five_step_spec("fsdp", 2);
  spec.after_step = [](int, int, Engine& engine, nn::CausalModel&) {
    EXPECT_THROW(engine.for_each_gradient([](const GradientShard&) {}), base::InvalidUsage);
  };
  train(spec);
}

// --- values

TEST(BroadcastFrom, CopiesValuesOfOneRankToAll) {
  for (const char* name : kStrategies)
    for (const DType dtype : {DType::f32, DType::bf16}) {
      TrainingSpec spec = five_step_spec(name, 4);
      spec.steps = 1;
      spec.dtype = dtype;
      spec.before_training = [&](Engine& engine, comm::Communicator& control) {
        engine.state().broadcast_from(2, [&](const fsdp::Parameter& parameter, nn::ElementRange range, float* out) {
          EXPECT_EQ(control.rank(), 2);
          EXPECT_EQ(range.count(), parameter.count());
          for (std::int64_t i = 0; i < range.count(); ++i)
            out[i] = static_cast<float>(parameter.name().size()) + 1e-3F * static_cast<float>(i % 1000);
        });
        for (const auto& [parameter, values] : values_of(engine))
          for (std::size_t i = 0; i < values.size(); ++i)
            ASSERT_EQ(values[i], static_cast<float>(parameter.size()) + 1e-3F * static_cast<float>(i % 1000))
                << name << parameter;
        EXPECT_THROW(engine.state().broadcast_from(4, {}), base::InvalidUsage);
      };
      train(spec);
    }
}

/// The program sets some parameters, Init sets the others; each rank writes only its own ranges.
TEST(Initialize, UsesLoaderOfProgram) {
  TrainingSpec spec = five_step_spec("fsdp", 4);
  spec.steps = 1;
  std::atomic<std::int64_t> filled{0};
  std::int64_t attention = 0;
  spec.before_training = [&](Engine& engine, comm::Communicator& control) {
    engine.initialize(7);
    const Values drawn = values_of(engine);
    engine.state().initialize(
        7,
        [&](const fsdp::Parameter&, nn::ElementRange range, float* out) {
          filled += range.count();
          std::fill_n(out, range.count(), 0.25F);
        },
        is_attention);
    for (const auto& [parameter, values] : values_of(engine)) {
      if (parameter.find(".attn.") == std::string::npos) {
        EXPECT_EQ(values, drawn.at(parameter)) << parameter;
        continue;
      }
      EXPECT_THAT(values, testing::Each(0.25F));
      if (control.rank() == 0) attention += static_cast<std::int64_t>(values.size());
    }
  };
  train(spec);
  EXPECT_EQ(filled.load(), attention);
}

/// Initializing also resets moments and step count: the last steps repeat the first ones.
TEST(Initialize, ResetsTraining) {
  for (const char* name : {"ddp", "zero1", "fsdp"}) {
    std::mutex mutex;
    std::map<int, Values> ends;
    TrainingSpec spec = five_step_spec(name, 2);
    spec.engine.optimizer = {.amsgrad = true};
    spec.steps = 6;
    spec.repeat_data = 3;
    bool anew = true;
    spec.after_step = [&](int rank, int step, Engine& engine, nn::CausalModel&) {
      if (step % 3 != 2) return;
      const Values values = values_of(engine);
      if (anew) engine.initialize(0);
      const std::lock_guard lock(mutex);
      if (rank == 0) ends[step] = values;
    };
    train(spec);
    EXPECT_EQ(ends.at(2), ends.at(5)) << name;
    anew = false;  // the control
    train(spec);
    EXPECT_NE(ends.at(2), ends.at(5)) << name;
  }
}

/// The model itself has no memory: the engine allocates each rank's shard, and one unit while values are drawn or read.
TEST(Initialize, NeedsNoRankWithFullModel) {
  TrainingSpec spec = five_step_spec("fsdp", 4);
  spec.model.layers = 8;
  spec.steps = 0;
  std::vector<std::uint64_t> peaks(4);
  std::uint64_t whole = 0;
  spec.before_training = [&](Engine& engine, comm::Communicator& control) {
    const auto memory_tracker = nn_context(engine.model().runtime()).memory_tracker().snapshot();
    peaks[static_cast<std::size_t>(control.rank())] =
        memory_tracker.peak_of(MemoryCategory::parameter) + memory_tracker.peak_of(MemoryCategory::unsharded_parameter);
    if (control.rank() == 0)
      for (const UnitSize& unit : engine.stats().unit_sizes()) whole += static_cast<std::uint64_t>(unit.padded) * 4;
  };
  train(spec);
  for (const std::uint64_t peak : peaks) EXPECT_EQ(peak, whole / 4);
}

}  // namespace
}  // namespace tessera::fsdp
