// Models of several dtypes under every strategy: bitwise equality, bytes as by the formulas, checkpoints.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tessera/fsdp/checkpoint.h"
#include "tessera/nn/activation_checkpoint.h"
#include "tests/fsdp/checkpoint_support.h"
#include "tests/harness/guarded_device.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::fsdp {
namespace {

using base::MemoryCategory;
using harness::same_bits;
using harness::train;
using harness::TrainingRecord;
using nn::test::error_of;

struct Case {
  const char* name;
  DType whole;
  std::vector<std::pair<std::string, DType>> parts;
  std::optional<DType> reduce;
  Precision precision() const { return make_precision(whole, reduce); }
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"norms_f32", DType::bf16, {{"type:LayerNorm", DType::f32}}, {}},
      {"norms_f32_reduced_in_f32", DType::bf16, {{"type:LayerNorm", DType::f32}}, DType::f32},
      {"block_bf16", DType::f32, {{"h.1", DType::bf16}}, {}},
      {"block_bf16_reduced_in_f32", DType::f32, {{"h.1", DType::bf16}, {"h.2.mlp", DType::bf16}}, DType::f32},
      {"three", DType::f16, {{"type:LayerNorm", DType::f32}, {"h.1.attn", DType::bf16}}, DType::f32}};
  return all;
}

TrainingSpec mixed_spec(const std::string& strategy, int ranks, const Case& c, const std::string& mesh = "") {
  TrainingSpec spec =
      base_spec(strategy, ranks, {.mesh = mesh, .clip_norm = 0.5, .dtype = c.whole, .reduce_dtype = c.reduce});
  spec.module_dtypes = c.parts;
  return spec;
}

class MixedDtypes : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Models, MixedDtypes, testing::ValuesIn(cases()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(MixedDtypes, StrategiesAreBitwiseEqual) {
  for (const int ranks : {1, 2, 4}) {
    const TrainingRecord ddp = train(mixed_spec("ddp", ranks, GetParam()));
    for (const char* name : {"zero1", "zero2", "fsdp", "shard_grad_op"})
      EXPECT_TRUE(same_bits(ddp, train(mixed_spec(name, ranks, GetParam())))) << name << " of " << ranks;
    for (const double loss : ddp.losses) EXPECT_TRUE(std::isfinite(loss));
    if (ranks < 4 || !GetParam().reduce) continue;  // two stages of half-precision sums round twice
    EXPECT_TRUE(same_bits(ddp, train(mixed_spec("hsdp", 4, GetParam(), "2x2"))));
  }
}

TEST_P(MixedDtypes, DetectsOtherDtypes) {
  TrainingSpec other = mixed_spec("ddp", 2, GetParam());
  const TrainingRecord mixed = train(other);
  other.module_dtypes.clear();
  EXPECT_FALSE(same_bits(mixed, train(other)));
}

TEST_P(MixedDtypes, LazyStreamsAndActivationCheckpointingAreBitwiseEqual) {
  for (const char* name : {"ddp", "zero1", "fsdp"}) {
    TrainingSpec spec = mixed_spec(name, 2, GetParam());
    spec.engine.poison = true;
    const TrainingRecord eager = train(spec);
    spec.lazy_streams = true;
    EXPECT_TRUE(same_bits(eager, train(spec))) << name;
    spec.make_model = [config = spec.model](nn::Context& context) {
      auto model = nn::make_model(context, config);
      nn::checkpoint_activations(*model);
      return model;
    };
    EXPECT_TRUE(same_bits(eager, train(spec))) << name;
  }
}

void expect_formulas(const TrainingSpec& spec, const TrainingRecord& record, Precision precision) {
  const StepShape shape{.microbatches = spec.microbatches};
  const auto formula = communication_formula(spec.engine.strategy, record.mesh, record.unit_sizes, precision, shape);
  const auto steps = static_cast<std::uint64_t>(spec.steps - 1);
  for (const EngineTraffic& rank : record.later_by_rank) {
    EXPECT_EQ(rank.all_gather.bytes_sent, steps * formula.bytes.all_gather);
    EXPECT_EQ(rank.reduce_scatter.bytes_sent, steps * formula.bytes.reduce_scatter);
    EXPECT_EQ(rank.all_reduce.bytes_sent, steps * formula.bytes.all_reduce);
    EXPECT_EQ(rank.all_gather.calls, steps * formula.calls.all_gather);
    EXPECT_EQ(rank.reduce_scatter.calls, steps * formula.calls.reduce_scatter);
    EXPECT_EQ(rank.all_reduce.calls, steps * formula.calls.all_reduce);
  }
  const auto state = model_state_formula(spec.engine.strategy, record.mesh, record.unit_sizes, 2, precision);
  const PeakBounds bounds = peak_formula(spec.engine.strategy, record.mesh, record.unit_sizes, shape, precision);
  for (std::size_t rank = 0; rank < record.memory_trackers.size(); ++rank) {
    EXPECT_THAT(record.model_state[rank], testing::ElementsAre(state.parameter, state.gradient, state.optimizer));
    EXPECT_LE(record.memory_trackers[rank].peak_of(MemoryCategory::unsharded_parameter), bounds.unsharded_parameter);
    EXPECT_LE(record.memory_trackers[rank].peak_of(MemoryCategory::unsharded_gradient), bounds.unsharded_gradient);
  }
  EXPECT_EQ(record.copied_bytes, 0U);
}

TEST_P(MixedDtypes, CostEqualsFormulas) {
  for (const auto& [name, ranks, mesh] :
       {std::tuple("ddp", 3, ""), std::tuple("zero1", 2, ""), std::tuple("zero2", 4, ""), std::tuple("fsdp", 3, ""),
        std::tuple("hsdp", 4, "2x2"), std::tuple("fsdp", 1, "")}) {
    SCOPED_TRACE(name + std::to_string(ranks));
    TrainingSpec spec = mixed_spec(name, ranks, GetParam(), mesh);
    const TrainingRecord record = train(spec);
    expect_formulas(spec, record, GetParam().precision());
    // The control: the formulas with all parameters of the model's dtype.
    std::vector<UnitSize> one_dtype = record.unit_sizes;
    std::size_t others = 0;
    for (UnitSize& unit : one_dtype) {
      others += unit.others.size();
      for (const OtherFlat& other : std::exchange(unit.others, {})) unit.padded += other.padded;
    }
    EXPECT_GT(others, 0U);
    const auto bytes = [&](const std::vector<UnitSize>& units) {
      return model_state_formula(spec.engine.strategy, record.mesh, units, 2, GetParam().precision()).optimizer;
    };
    EXPECT_NE(bytes(one_dtype), bytes(record.unit_sizes)) << "masters for what is f32";
    spec.global_batch = 4 * ranks;
    spec.microbatches = 2;
    for (const char* when : {"every", "last"}) {
      spec.engine.strategy = with_accumulation(strategy_named(name), parse_accumulation(when));
      expect_formulas(spec, train(spec), GetParam().precision());
    }
  }
}

TEST(MixedUnits, HoldOneFlatParameterPerDtype) {
  const Case& c = cases()[0];
  const TrainingSpec spec = mixed_spec("fsdp", 2, c);
  const TrainingRecord record = train(spec);
  const std::int64_t width = spec.model.width;
  ASSERT_EQ(record.unit_sizes.size(), 4U);
  for (const UnitSize& unit : record.unit_sizes) {
    ASSERT_EQ(unit.others.size(), 1U);
    EXPECT_EQ(unit.others[0].padded, unit.is_root ? 2 * width : 4 * width) << "weights and biases of norms";
    EXPECT_EQ(unit.others[0].precision, (Precision{DType::f32, DType::f32}));
  }
  nn::Context context;
  const auto model = nn::make_model(context, spec.model);
  model->set_dtype(c.whole);
  NnModel adapted(*model);
  for (Module* norm : modules_named(adapted.root(), "type:LayerNorm", "")) nn_module(*norm).set_dtype(DType::f32);
  const auto planned = planned_units(adapted.root(), "block", spec.engine.strategy, record.mesh);
  EXPECT_EQ(communication_formula(spec.engine.strategy, record.mesh, planned, c.precision()).bytes,
            communication_formula(spec.engine.strategy, record.mesh, record.unit_sizes, c.precision()).bytes);
}

/// Norms of another dtype may be frozen, too; they then have neither gradient nor optimizer state.
TEST(MixedUnits, MayBePartlyFrozen) {
  for (const char* name : {"zero1", "fsdp"}) {
    TrainingSpec spec = mixed_spec(name, 2, cases()[0]);
    spec.before_training = [](Engine& engine, comm::Communicator&) {
      for (const auto& parameter : engine.state().parameters())
        if (parameter->dtype() == DType::f32) nn::Tensor(nn_parameter(*parameter).tensor()).set_requires_grad(false);
      engine.apply_requires_grad();
    };
    const TrainingRecord record = train(spec);
    for (const UnitSize& unit : record.unit_sizes) {
      EXPECT_FALSE(unit.others.at(0).trained);
      EXPECT_EQ(unit.frozen, 0);
    }
    expect_formulas(spec, record, cases()[0].precision());
    for (const float value : record.parameters.at("ln_f.weight")) EXPECT_EQ(value, 1.0F);
  }
}

TEST_P(MixedDtypes, CpuOffloadIsBitwiseEqualAndMovesFormulaBytes) {
  for (const auto& [name, ranks] : {std::pair("zero2", 2), std::pair("fsdp", 1), std::pair("fsdp", 2)}) {
    TrainingSpec spec = mixed_spec(name, ranks, GetParam());
    spec.engine.poison = true;
    spec.engine.offload_chunk_elements = 5001;
    spec.runtime = harness::make_guarded_device({.lazy = true});
    const TrainingRecord plain = train(spec);
    spec.engine.cpu_offload = true;
    const TrainingRecord record = train(spec);
    EXPECT_TRUE(same_bits(record, plain)) << name;
    OffloadBytes formula =
        offload_formula(spec.engine.strategy, record.mesh, record.unit_sizes, 2, GetParam().precision());
    formula.to_device *= static_cast<std::uint64_t>(spec.steps - 1);
    formula.to_host *= static_cast<std::uint64_t>(spec.steps - 1);
    EXPECT_EQ(record.later_offload, formula) << name;
  }
}

TEST(MixedUnits, DeviceIsBitwiseEqualAndHostNeverWaits) {
  TrainingSpec spec = mixed_spec("fsdp", 2, cases()[1]);
  spec.steps = 4;
  const TrainingRecord host = train(spec);
  spec.runtime = harness::make_guarded_device({.lazy = true});
  const TrainingRecord record = train(spec);
  EXPECT_TRUE(same_bits(record, host));
  for (const auto& steps : record.waits)
    for (std::size_t step = 2; step < steps.size(); ++step) EXPECT_EQ(steps[step], harness::HostWaits{});
}

// --- checkpoints

TEST_P(MixedDtypes, CheckpointsHoldF32AndRestoreToAnyDtypes) {
  const nn::test::TemporaryDirectory directory;
  TrainingSpec spec = mixed_spec("fsdp", 2, GetParam());
  spec.global_batch = 12;
  spec.steps = 4;
  const TrainingRecord whole = train(saving(spec, directory.path(), 1));
  const TrainingRecord later = train(resuming(spec, directory.path(), 2));
  EXPECT_EQ(later.parameters, whole.parameters) << "an interrupted run";
  EXPECT_EQ(later.losses, std::vector<double>(whole.losses.begin() + 2, whole.losses.end()));
  TrainingSpec until = spec;
  until.steps = 2;
  const auto saved = train(until).parameters;
  EXPECT_NE(saved, whole.parameters);
  for (const auto& [name, ranks] : {std::pair("zero1", 3), std::pair("fsdp", 4), std::pair("ddp", 1)})
    for (const Case& other : cases()) {
      TrainingSpec next = mixed_spec(name, ranks, other);
      next.global_batch = 12;
      next.steps = 2;
      EXPECT_EQ(train(resuming(next, directory.path(), 2)).parameters, saved) << name << " " << other.name;
    }
}

TEST(MixedUnits, RejectTiedParameterOfTwoDtypes) {
  TrainingSpec spec = mixed_spec("fsdp", 1, {"", DType::bf16, {{"lm_head", DType::f32}}, {}});
  EXPECT_THAT(error_of<base::InvalidUsage>([&] { train(spec); }),
              testing::HasSubstr("wte is of bf16, and its parameter wte.weight"));
}

}  // namespace
}  // namespace tessera::fsdp
