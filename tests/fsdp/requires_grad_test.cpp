// Parameters that are frozen and unfrozen between steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>

#include "tessera/fsdp/checkpoint.h"
#include "tests/fsdp/checkpoint_support.h"
#include "tests/harness/guarded_device.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::fsdp {
namespace {

using base::DType;
using harness::same_bits;
using harness::train;
using harness::TrainingRecord;
using testing::HasSubstr;

void freeze(nn::Module& model, bool frozen, const std::function<bool(const nn::Parameter&)>& which = is_attention) {
  for (const auto& parameter : model.parameters()) {
    nn::Tensor tensor = parameter->tensor();
    if (which(*parameter)) tensor.set_requires_grad(!frozen);
  }
}

/// This rank's shard of the optimizer state, by name and index.
std::map<std::string, float> states_of(Engine& engine) {
  std::map<std::string, float> states;
  engine.state().for_each_shard([&](const ShardRange& own) {
    if (own.state < 0) return;
    for (std::int64_t i = 0; i < own.range.count(); i += 13)
      states[own.parameter.name() + "/" + std::to_string(own.state) + "/" + std::to_string(own.range.begin + i)] =
          static_cast<const float*>(own.data)[i];
  });
  return states;
}

// --- frozen from the beginning

class FrozenModel : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, FrozenModel, testing::Values(1, 2, 3, 4));

TEST_P(FrozenModel, StrategiesAreBitwiseEqual) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    std::optional<TrainingRecord> first;
    for (const char* name : kStrategies) {
      if (std::string(name) == "hsdp" && GetParam() % 2 != 0) continue;
      TrainingSpec spec = five_step_spec(name, GetParam());
      spec.dtype = dtype;
      if (dtype != DType::f32) spec.engine.reduce_dtype = DType::f32;
      spec.lazy_streams = true;
      spec.engine.poison = true;
      spec.before_training = [](Engine& engine, comm::Communicator&) {
        freeze(nn_module(engine.model().root()), true);
        engine.apply_requires_grad();
      };
      const TrainingRecord record = train(spec);
      if (!first) first = record;
      EXPECT_TRUE(same_bits(*first, record)) << name;
    }
  }
}

TEST(FrozenParameters, StayUnchangedAndHaveNoGradient) {
  for (const char* name : {"ddp", "zero2", "fsdp"}) {
    TrainingSpec spec = five_step_spec(name, 2);
    Values before, after;
    std::int64_t frozen = 0;
    spec.before_training = [&](Engine& engine, comm::Communicator& control) {
      freeze(nn_module(engine.model().root()), true);
      engine.apply_requires_grad();
      const Values values = values_of(engine);
      if (control.rank() == 0) before = values;
      if (control.rank() == 0)
        for (const UnitSize& unit : engine.stats().unit_sizes()) frozen += unit.frozen;
    };
    spec.after_step = [&](int rank, int, Engine& engine, nn::CausalModel&) {
      const Values values = values_of(engine);
      if (rank == 0) after = values;
    };
    const TrainingRecord record = train(spec);
    int kept = 0;
    for (const auto& [parameter, values] : before) {
      const bool attention = parameter.find(".attn.") != std::string::npos;
      EXPECT_EQ(values == after.at(parameter), attention) << parameter;
      kept += attention ? 1 : 0;
    }
    EXPECT_EQ(kept, 8);
    std::int64_t padded = 0;
    for (const UnitSize& unit : record.unit_sizes) padded += unit.padded;
    EXPECT_GT(frozen, 0);
    const auto state = model_state_formula(spec.engine.strategy, record.mesh, padded - frozen, 2);
    for (const auto& bytes : record.model_state) {
      EXPECT_EQ(bytes[1], state.gradient) << name;
      EXPECT_EQ(bytes[2], state.optimizer) << name;
    }
  }
}

// --- between steps

/// apply_requires_grad() changes neither values nor the remaining optimizer states.
TEST(ApplyRequiresGrad, KeepsValuesAndOptimizerState) {
  for (const char* name : kStrategies)
    for (const DType dtype : {DType::f32, DType::bf16}) {
      TrainingSpec spec = five_step_spec(name, 2);
      spec.dtype = dtype;
      spec.after_step = [&](int, int step, Engine& engine, nn::CausalModel& model) {
        if (step != 1) return;
        const Values values = values_of(engine);
        const auto states = states_of(engine);
        EXPECT_FALSE(states.empty());
        freeze(model, true);
        engine.apply_requires_grad();
        // Frozen half-precision parameters lose their master weights; those that are trained must not have changed.
        for (const auto& [parameter, now] : values_of(engine))
          if (dtype == DType::f32 || parameter.find(".attn.") == std::string::npos) {
            EXPECT_EQ(now, values.at(parameter)) << name << parameter;
          }
        // Shards begin elsewhere now, so only some indices are on the same rank as before.
        int same = 0;
        for (const auto& [place, value] : states_of(engine)) {
          EXPECT_EQ(place.find(".attn."), std::string::npos);
          const auto before = states.find(place);
          if (before == states.end()) continue;
          EXPECT_EQ(value, before->second) << place;
          ++same;
        }
        EXPECT_GT(same, 100);
      };
      train(spec);
    }
}

/// Under ddp each rank holds everything, so its run with apply_requires_grad() equals one with masked gradients: the
/// reference.
TEST(ApplyRequiresGrad, StrategiesAreBitwiseEqual) {
  const auto run = [](const std::string& name, int ranks) {
    TrainingSpec spec = five_step_spec(name, ranks);
    spec.global_batch = 12;
    spec.steps = 6;
    spec.after_step = [](int, int step, Engine& engine, nn::CausalModel& model) {
      if (step == 1) freeze(model, true);
      if (step == 3) freeze(model, false);
      if (step == 1 || step == 3) engine.apply_requires_grad();
    };
    return train(spec);
  };
  for (const int ranks : {2, 3, 4}) {
    const TrainingRecord ddp = run("ddp", ranks);
    for (const char* name : kStrategies)
      if (!strategy_named(name).two_axes || ranks % 2 == 0) {
        EXPECT_TRUE(same_bits(ddp, run(name, ranks))) << name;
      }
    TrainingSpec control = five_step_spec("ddp", ranks);
    control.global_batch = 12;
    control.steps = 6;
    EXPECT_FALSE(same_bits(ddp, train(control)));
  }
}

/// Adam's bias correction counts from the step at which a parameter becomes trainable: its first update is lr, as in
/// PyTorch, where each parameter has its own step count.
TEST(ApplyRequiresGrad, BiasCorrectionStartsWithTraining) {
  TrainingSpec spec = five_step_spec("fsdp", 2);
  spec.engine.optimizer = {.kind = nn::OptimizerConfig::Kind::adam, .weight_decay = 0};
  spec.lr = 1e-3;
  spec.steps = 4;
  spec.before_training = [](Engine& engine, comm::Communicator&) {
    freeze(nn_module(engine.model().root()), true);
    engine.apply_requires_grad();
  };
  std::map<int, Values> values;
  spec.after_step = [&](int rank, int step, Engine& engine, nn::CausalModel& model) {
    if (step == 2) freeze(model, false);
    if (step == 2) engine.apply_requires_grad();
    Values now = values_of(engine);
    if (rank == 0) values[step] = std::move(now);
  };
  train(spec);
  int moved = 0;
  for (const auto& [parameter, after] : values[3]) {
    if (parameter.find(".attn.c_proj.weight") == std::string::npos) continue;
    const std::vector<float>& before = values[2].at(parameter);
    for (std::size_t i = 0; i < after.size(); ++i) {
      const double step = std::abs(static_cast<double>(after[i]) - before[i]);
      EXPECT_LT(step, 1.01e-3);
      moved += step > 0.9e-3 ? 1 : 0;
    }
    EXPECT_GT(moved, static_cast<int>(after.size()) / 2);  // all but those with tiny gradients
  }
  EXPECT_GT(moved, 0);
}

/// The same in a run resumed from a checkpoint.
TEST(ApplyRequiresGrad, ResumedRunKeepsStartOfTraining) {
  const nn::test::TemporaryDirectory directory;
  TrainingSpec spec = five_step_spec("fsdp", 2);
  spec.before_training = [](Engine& engine, comm::Communicator&) {
    freeze(nn_module(engine.model().root()), true);
    engine.apply_requires_grad();
  };
  spec.after_step = [](int, int step, Engine& engine, nn::CausalModel& model) {
    if (step != 1) return;
    freeze(model, false);
    engine.apply_requires_grad();
  };
  spec = saving(spec, directory.path(), 2);
  const TrainingRecord whole = train(spec);
  TrainingSpec resumed = five_step_spec("fsdp", 2);
  resumed.first_step = 3;
  resumed.seed = 9;
  for (const bool forgets : {false, true}) {
    resumed.before_training = [&](Engine& engine, comm::Communicator&) {
      Checkpoint checkpoint(directory.path());
      restore(engine, checkpoint);
      if (forgets) engine.state().set_trained_since([](const fsdp::Parameter&) { return std::uint64_t{0}; });
    };
    EXPECT_EQ(train(resumed).parameters == whole.parameters, !forgets);  // the control is not equal
  }
}

TEST(ApplyRequiresGrad, SupportsDevicesAndCpuOffload) {
  TrainingSpec spec = five_step_spec("fsdp", 2);
  spec.model.layers = 1;
  spec.steps = 3;
  spec.engine.measure_norm = false;
  spec.after_step = [](int, int step, Engine& engine, nn::CausalModel& model) {
    if (step > 1) return;
    freeze(model, step == 0);
    engine.apply_requires_grad();
  };
  const TrainingRecord host = train(spec);
  for (const bool offload : {false, true}) {
    spec.runtime = harness::make_guarded_device({.lazy = true});
    spec.engine.cpu_offload = offload;
    EXPECT_TRUE(same_bits(host, train(spec))) << offload;
  }
}

TEST(ApplyRequiresGrad, CallOnOneRankIsMismatchOnAll) {
  for (const char* name : {"ddp", "fsdp"}) {
    TrainingSpec spec = five_step_spec(name, 3);
    std::mutex mutex;
    std::map<int, std::string> errors;
    comm::InitOptions config;
    config.backend = "shm";
    config.timeout = std::chrono::seconds(20);
    comm::run_threads(3, config, [&](comm::Communicator& world) {
      nn::Context context({.threads = 1, .memory_tracker = world.memory_tracker(), .memory = {}, .make_stream = {}});
      const auto model = nn::make_model(context, spec.model);
      Engine engine(*model, world, spec.engine);
      engine.initialize(0);
      const auto one_step = [&](int step) {
        const auto batch = harness::make_batch(context, spec, step, world.rank());
        harness::forward_backward(*model, batch);
        engine.step(1e-3);
      };
      one_step(0);
      try {
        if (world.rank() == 1) engine.apply_requires_grad();
        for (int step = 1; step < 4; ++step) one_step(step);
      } catch (const base::Error& error) {
        const std::lock_guard lock(mutex);
        errors[world.rank()] = std::string(error.kind()) + ": " + error.what();
      }
    });
    ASSERT_EQ(errors.size(), 3U) << name;
    EXPECT_THAT(errors[1], HasSubstr("Mismatch: execution order: the ranks differ: rank 0: step 2"));
    for (const auto& [rank, text] : errors) {
      EXPECT_THAT(text, HasSubstr("execution order: the ranks differ"));
      EXPECT_THAT(text, HasSubstr("rank 1: apply_requires_grad with nothing frozen"));
    }
  }
}

TEST(ApplyRequiresGrad, DifferentParametersAreMismatch) {
  TrainingSpec spec = five_step_spec("fsdp", 2);
  spec.before_training = [](Engine& engine, comm::Communicator& control) {
    if (control.rank() == 1) freeze(nn_module(engine.model().root()), true);
    try {
      engine.apply_requires_grad();
      ADD_FAILURE();
    } catch (const base::Mismatch& error) {
      EXPECT_THAT(
          error.what(),
          HasSubstr(
              "rank 0: apply_requires_grad with nothing frozen; rank 1: apply_requires_grad with frozen h.0.attn"));
    }
    throw 1;  // the test ends here
  };
  EXPECT_THROW(train(spec), int);
}

TEST(ApplyRequiresGrad, IsRejectedBetweenBackwardAndStep) {
  TrainingSpec spec = five_step_spec("fsdp", 2);
  spec.after_backward = [](int, int, Engine& engine, nn::CausalModel&) {
    EXPECT_THROW(engine.apply_requires_grad(), base::InvalidUsage);
  };
  train(spec);
}

}  // namespace
}  // namespace tessera::fsdp
