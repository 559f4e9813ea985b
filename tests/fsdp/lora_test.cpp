// A frozen model with adapters under the engine: what is trained, its cost, its checkpoints.
#include "tessera/nn/lora.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/fsdp/checkpoint.h"
#include "tessera/nn/activation_checkpoint.h"
#include "tests/fsdp/models.h"
#include "tests/harness/guarded_device.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::fsdp {
namespace {

using base::MemoryCategory;
using harness::same_bits;
using harness::train;
using harness::TrainingRecord;
using nn::test::error_of;

class Lora : public testing::TestWithParam<std::tuple<const char*, int>> {};

TEST_P(Lora, StrategiesAreBitwiseEqualAndBaseStaysUnchanged) {
  const auto& [strategy, ranks] = GetParam();
  for (const char* model : {"gpt-nano", "llama-nano"})
    for (const base::DType dtype : {base::DType::f32, base::DType::bf16}) {
      TrainingSpec ddp = lora_spec("ddp", ranks, model), spec = lora_spec(strategy, ranks, model);
      ddp.dtype = spec.dtype = dtype;
      if (dtype != base::DType::f32) ddp.engine.reduce_dtype = spec.engine.reduce_dtype = base::DType::f32;
      spec.lazy_streams = spec.engine.poison = true;
      const TrainingRecord expected = train(ddp), record = train(spec);
      EXPECT_TRUE(same_bits(record, expected)) << model;
      TrainingSpec untrained = lora_spec(strategy, ranks, model);
      untrained.dtype = dtype;
      untrained.steps = 0;
      const TrainingRecord before = train(untrained);
      for (const auto& [name, values] : record.parameters)
        EXPECT_EQ(values == before.parameters.at(name), !nn::is_adapter(name)) << name;
    }
}

TEST_P(Lora, CostEqualsFormulas) {
  const auto& [strategy, ranks] = GetParam();
  const TrainingSpec spec = lora_spec(strategy, ranks);
  const TrainingRecord record = train(spec);
  const CommunicationFormula formula = communication_formula(spec.engine.strategy, record.mesh, record.unit_sizes);
  for (const EngineTraffic& rank : record.later_by_rank) {
    EXPECT_EQ(harness::calls_per_step(rank, spec.steps - 1), formula.calls);
    EXPECT_EQ(harness::bytes_per_step(rank, spec.steps - 1), formula.bytes);
  }
  const ModelStateBytes state = model_state_formula(spec.engine.strategy, record.mesh, record.unit_sizes, kAdamSlots);
  for (const auto& rank : record.model_state)
    EXPECT_THAT(rank, testing::ElementsAre(state.parameter, state.gradient, state.optimizer));
  const PeakBounds bounds = peak_formula(spec.engine.strategy, record.mesh, record.unit_sizes, {});
  for (const auto& memory_tracker : record.memory_trackers) {
    EXPECT_LE(memory_tracker.peak_of(MemoryCategory::unsharded_parameter), bounds.unsharded_parameter);
    EXPECT_EQ(memory_tracker.peak_of(MemoryCategory::unsharded_gradient), bounds.unsharded_gradient);
  }
  EXPECT_EQ(record.copied_bytes, 0U);
}

INSTANTIATE_TEST_SUITE_P(Strategies, Lora,
                         testing::Combine(testing::Values("ddp", "zero1", "zero2", "fsdp", "hsdp", "shard_grad_op"),
                                          testing::Values(1, 2, 3, 4)),
                         [](const auto& given) {
                           return std::string(std::get<0>(given.param)) + "_" +
                                  std::to_string(std::get<1>(given.param));
                         });

TEST_P(Lora, QuantizedModelIsBitwiseEqualAndCostsFormulas) {
  const auto& [strategy, ranks] = GetParam();
  for (const base::DType dtype : {base::DType::f32, base::DType::bf16}) {
    TrainingSpec ddp = quantized(lora_spec("ddp", ranks)), spec = quantized(lora_spec(strategy, ranks));
    ddp.dtype = spec.dtype = dtype;
    if (dtype != base::DType::f32) ddp.engine.reduce_dtype = spec.engine.reduce_dtype = base::DType::f32;
    spec.lazy_streams = spec.engine.poison = true;
    const TrainingRecord record = train(spec);
    EXPECT_TRUE(same_bits(record, train(ddp))) << strategy;
    const Precision precision = make_precision(dtype, spec.engine.reduce_dtype);
    const auto formula = communication_formula(spec.engine.strategy, record.mesh, record.unit_sizes, precision);
    for (const EngineTraffic& rank : record.later_by_rank) {
      EXPECT_EQ(harness::calls_per_step(rank, spec.steps - 1), formula.calls);
      EXPECT_EQ(harness::bytes_per_step(rank, spec.steps - 1), formula.bytes);
    }
    const ModelStateBytes state =
        model_state_formula(spec.engine.strategy, record.mesh, record.unit_sizes, kAdamSlots, precision);
    for (const auto& rank : record.model_state)
      EXPECT_THAT(rank, testing::ElementsAre(state.parameter, state.gradient, state.optimizer));
    const PeakBounds bounds = peak_formula(spec.engine.strategy, record.mesh, record.unit_sizes, {}, precision);
    for (const auto& memory_tracker : record.memory_trackers)
      EXPECT_LE(memory_tracker.peak_of(MemoryCategory::unsharded_parameter), bounds.unsharded_parameter);
    for (const UnitSize& unit : record.unit_sizes) EXPECT_EQ(unit.bytes == 0, unit.is_root);
  }
}

/// 4 bits per weight, 8 per 64 weights, 32 per tensor and per 16384 weights; a block of width 64 has four tensors.
TEST(AdapterCost, QuantizedBlockHasBytesOfPaper) {
  const TrainingRecord record = train(quantized(lora_spec("fsdp", 2)));
  const std::int64_t weights = 12 * 64 * 64;
  EXPECT_EQ(record.unit_sizes.at(1).bytes, weights / 2 + weights / 64 + 4 * (4 + 4));
  const TrainingRecord dense = train(lora_spec("fsdp", 2));
  EXPECT_NE(record.losses, dense.losses) << "rounded weights are others";
  EXPECT_NEAR(record.losses[0], dense.losses[0], 0.05 * dense.losses[0]);
}

/// Negative control: the formulas of full training give other values.
TEST(AdapterCost, DetectsCostOfFullTraining) {
  for (const char* strategy : {"ddp", "zero2", "fsdp"}) {
    const TrainingSpec spec = lora_spec(strategy, 4);
    const TrainingRecord record = train(spec);
    std::vector<UnitSize> whole = record.unit_sizes;
    for (UnitSize& unit : whole) {
      EXPECT_GT(unit.frozen, 0);
      EXPECT_EQ(unit.is_root, unit.trained() == 0);
      unit.frozen = 0;
    }
    const auto cost = [&](const std::vector<UnitSize>& units) {
      return communication_formula(spec.engine.strategy, record.mesh, units).bytes;
    };
    EXPECT_LT(20 * (cost(record.unit_sizes).reduce_scatter + cost(record.unit_sizes).all_reduce),
              cost(whole).reduce_scatter + cost(whole).all_reduce);
    const auto optimizer = [&](const std::vector<UnitSize>& units) {
      return model_state_formula(spec.engine.strategy, record.mesh, units, kAdamSlots).optimizer;
    };
    EXPECT_LT(20 * optimizer(record.unit_sizes), optimizer(whole));
  }
}

TEST(AdapterTraining, SupportsActivationCheckpointingAndMicrobatches) {
  for (const auto& [strategy, four_bits] :
       {std::pair("ddp", false), std::pair("fsdp", false), std::pair("fsdp", true)}) {
    TrainingSpec spec = lora_spec(strategy, 2);
    if (four_bits) spec = quantized(spec);
    spec.global_batch = 8;
    spec.microbatches = 2;
    spec.lazy_streams = false;  // a host that runs ahead keeps more memory live
    const TrainingRecord plain = train(spec);
    spec.make_model = [make = spec.make_model](nn::Context& context) {
      auto model = make(context);
      nn::checkpoint_activations(*model);
      return model;
    };
    const TrainingRecord record = train(spec);
    EXPECT_TRUE(same_bits(record, plain)) << strategy;
    EXPECT_LT(record.memory_trackers[0].peak_of(MemoryCategory::activation),
              plain.memory_trackers[0].peak_of(MemoryCategory::activation));
  }
}

/// Frozen shards are copied to the device for gathers and never copied back.
TEST(AdapterTraining, CpuOffloadMovesFormulaBytes) {
  for (const auto& [strategy, ranks] : {std::pair("zero2", 2), std::pair("fsdp", 1), std::pair("fsdp", 2)}) {
    TrainingSpec spec = lora_spec(strategy, ranks);
    spec.engine.poison = true;
    spec.runtime = harness::make_guarded_device({.lazy = true});
    const TrainingRecord plain = train(spec);
    spec.engine.cpu_offload = true;
    const TrainingRecord record = train(spec);
    EXPECT_TRUE(same_bits(record, plain)) << strategy;
    const auto steps = static_cast<std::uint64_t>(spec.steps - 1);
    OffloadBytes formula = offload_formula(spec.engine.strategy, record.mesh, record.unit_sizes, kAdamSlots);
    formula.to_device *= steps;
    formula.to_host *= steps;
    EXPECT_EQ(record.later_offload, formula) << strategy;
  }
}

TEST(AdapterTraining, QuantizedModelIsBitwiseEqualOnDevice) {
  TrainingSpec spec = quantized(lora_spec("fsdp", 2));
  const TrainingRecord host = train(spec);
  spec.runtime = harness::make_guarded_device({.lazy = true});
  EXPECT_TRUE(same_bits(train(spec), host));
}

class AdapterCheckpoints : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Quantized, AdapterCheckpoints, testing::Bool());

TEST_P(AdapterCheckpoints, RestoreOnAnyWorldAndRejectOtherModel) {
  const nn::test::TemporaryDirectory directory;
  const auto sized = [](const char* strategy, int ranks, int steps) {
    TrainingSpec spec = lora_spec(strategy, ranks);
    if (GetParam()) spec = quantized(spec);
    spec.global_batch = 12;
    spec.steps = steps;
    return spec;
  };
  const auto saved = [&](const char* strategy, int ranks, const std::string& name) {
    TrainingSpec spec = sized(strategy, ranks, 2);
    std::vector<comm::Communicator*> controls(static_cast<std::size_t>(ranks));
    spec.before_training = [&, fill = spec.before_training](Engine& engine, comm::Communicator& control) {
      if (fill) fill(engine, control);
      controls[static_cast<std::size_t>(control.rank())] = &control;
    };
    spec.after_step = [&](int rank, int step, Engine& engine, nn::CausalModel& model) {
      if (step != 1) return;
      comm::HostCollectives control(*controls[static_cast<std::size_t>(rank)], model.context().runtime());
      CheckpointWriter(engine, control, {.directory = directory.path(name), .asynchronous = false}).save({});
    };
    return train(spec);
  };
  const auto resumed = [&](const char* strategy, int ranks, const std::string& name) {
    TrainingSpec spec = sized(strategy, ranks, 2);
    spec.first_step = 2;
    spec.before_training = [&](Engine& engine, comm::Communicator&) {
      engine.initialize(99);
      Checkpoint checkpoint(directory.path(name));
      restore(engine, checkpoint);
    };
    return train(spec);
  };
  for (const auto& [strategy, ranks] : {std::pair("fsdp", 3), std::pair("zero1", 2)}) {
    const TrainingRecord record = saved(strategy, ranks, strategy);
    for (const auto& [other, others] : {std::pair("ddp", 1), std::pair("fsdp", 4), std::pair("hsdp", 2)})
      EXPECT_EQ(resumed(other, others, strategy).parameters, record.parameters) << other;
  }
  EXPECT_NE(train(sized("ddp", 1, 0)).parameters, resumed("ddp", 1, "fsdp").parameters) << "the control";
  Checkpoint checkpoint(directory.path("fsdp"));
  for (const CheckpointTensor& tensor : checkpoint.tensors())
    EXPECT_EQ(tensor.states, nn::is_adapter(tensor.name) ? kAdamSlots : 0) << tensor.name;
  TrainingSpec plain = sized("ddp", 1, 0);
  plain.make_model = {};
  plain.before_training = [&](Engine& engine, comm::Communicator&) { restore(engine, checkpoint); };
  EXPECT_THAT(error_of<base::InvalidUsage>([&] { train(plain); }), testing::HasSubstr("kept 0 values"));
}

}  // namespace
}  // namespace tessera::fsdp
