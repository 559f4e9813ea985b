// Half-precision training under every strategy: bitwise equality, bytes as by the table, effect of master weights.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "tests/fsdp/training_specs.h"

namespace tessera::fsdp {
namespace {

using base::MemoryCategory;
using harness::same_bits;
using harness::train;
using harness::TrainingRecord;

struct Case {
  DType compute;
  std::optional<DType> reduce;
  Precision precision() const { return make_precision(compute, reduce); }
};

std::string name_of(const Case& c) {
  return std::string(base::name_of(c.compute)) +
         (c.reduce ? std::string("_") + std::string(base::name_of(*c.reduce)) : "");
}

TrainingSpec precision_spec(const std::string& strategy, int ranks, const Case& c, const std::string& mesh = "") {
  return base_spec(strategy, ranks,
                   {.layers = 2, .mesh = mesh, .clip_norm = 0.5, .dtype = c.compute, .reduce_dtype = c.reduce});
}

class MixedPrecision : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Types, MixedPrecision,
                         testing::Values(Case{DType::bf16, {}}, Case{DType::bf16, DType::f32},
                                         Case{DType::f16, DType::f32}),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(MixedPrecision, StrategiesAreBitwiseEqual) {
  for (const int ranks : {1, 2, 3, 4}) {
    const TrainingRecord ddp = train(precision_spec("ddp", ranks, GetParam()));
    for (const char* name : {"zero1", "zero2", "fsdp", "shard_grad_op"})
      EXPECT_TRUE(same_bits(ddp, train(precision_spec(name, ranks, GetParam())))) << name << " of " << ranks;
  }
}

/// Two stages round a half-precision sum twice; in f32 the tree over replicas and shards is the flat one.
TEST_P(MixedPrecision, HsdpEqualsFsdpUnlessSumsRoundTwice) {
  const TrainingRecord fsdp = train(precision_spec("fsdp", 4, GetParam()));
  for (const char* mesh : {"1x4", "4x1", "2x2"}) {
    const bool twice = std::string(mesh) == "2x2" && GetParam().precision().reduce != DType::f32;
    EXPECT_EQ(same_bits(fsdp, train(precision_spec("hsdp", 4, GetParam(), mesh))), !twice) << mesh;
  }
}

TEST_P(MixedPrecision, LazyStreamsAreBitwiseEqual) {
  for (const char* name : {"ddp", "zero1", "zero2", "fsdp"}) {
    TrainingSpec spec = precision_spec(name, 2, GetParam());
    spec.engine.poison = true;
    const TrainingRecord eager = train(spec);
    spec.lazy_streams = true;
    EXPECT_TRUE(same_bits(eager, train(spec))) << name;
  }
}

TEST_P(MixedPrecision, CostEqualsFormulas) {
  for (const auto& [name, ranks, mesh] :
       {std::tuple("ddp", 3, ""), std::tuple("zero1", 2, ""), std::tuple("zero2", 4, ""), std::tuple("fsdp", 3, ""),
        std::tuple("hsdp", 4, "2x2"), std::tuple("fsdp", 1, "")}) {
    TrainingSpec spec = precision_spec(name, ranks, GetParam(), mesh);
    spec.model.layers = 4;
    const TrainingRecord record = train(spec);
    const Precision precision = GetParam().precision();
    const auto formula = communication_formula(spec.engine.strategy, record.mesh, record.unit_sizes, precision);
    const auto steps = static_cast<std::uint64_t>(spec.steps - 1);
    for (const EngineTraffic& rank : record.later_by_rank) {
      EXPECT_EQ(rank.all_gather.bytes_sent, steps * formula.bytes.all_gather) << name;
      EXPECT_EQ(rank.reduce_scatter.bytes_sent, steps * formula.bytes.reduce_scatter) << name;
      EXPECT_EQ(rank.all_reduce.bytes_sent, steps * formula.bytes.all_reduce) << name;
    }
    std::uint64_t padded = 0;
    for (const UnitSize& unit : record.unit_sizes) padded += static_cast<std::uint64_t>(unit.padded);
    const auto state =
        model_state_formula(spec.engine.strategy, record.mesh, static_cast<std::int64_t>(padded), 2, precision);
    const PeakBounds bounds = peak_formula(spec.engine.strategy, record.mesh, record.unit_sizes, {}, precision);
    for (std::size_t rank = 0; rank < record.memory_trackers.size(); ++rank) {
      EXPECT_THAT(record.model_state[rank], testing::ElementsAre(state.parameter, state.gradient, state.optimizer));
      EXPECT_LE(record.memory_trackers[rank].peak_of(MemoryCategory::unsharded_parameter), bounds.unsharded_parameter)
          << name;
      EXPECT_EQ(record.memory_trackers[rank].peak_of(MemoryCategory::unsharded_gradient), bounds.unsharded_gradient)
          << name;
    }
    EXPECT_EQ(record.copied_bytes, 0U);
  }
}

/// The numbers of the table. Negative control: the check above detects the state size of f32.
TEST(PrecisionFormulas, EqualTable) {
  const MeshShape four = MeshShape::grid(1, 4);
  const std::int64_t p = 4096;
  const auto bytes = [&](const char* name, Precision precision) {
    const ModelStateBytes b = model_state_formula(strategy_named(name), four, p, 2, precision);
    return std::array<std::uint64_t, 3>{b.parameter, b.gradient, b.optimizer};
  };
  const Precision bf16{DType::bf16, DType::bf16}, mixed{DType::bf16, DType::f32};
  EXPECT_THAT(bytes("ddp", bf16), testing::ElementsAre(2 * p, 2 * p, 12 * p));
  EXPECT_THAT(bytes("ddp", mixed), testing::ElementsAre(2 * p, 4 * p, 12 * p));
  EXPECT_THAT(bytes("fsdp", mixed), testing::ElementsAre(2 * p / 4, 4 * p / 4, 12 * p / 4));
  EXPECT_NE(bytes("fsdp", bf16), bytes("fsdp", {}));
  const std::vector<UnitSize> units = {{960, true, true}, {1920, false, false}, {480, true, false}};
  const auto half = communication_formula(strategy_named("fsdp"), four, units, bf16);
  const auto cast = communication_formula(strategy_named("fsdp"), four, units, mixed);
  const auto f32 = communication_formula(strategy_named("fsdp"), four, units);
  EXPECT_EQ(2 * half.bytes.all_gather, f32.bytes.all_gather);
  EXPECT_EQ(2 * half.bytes.reduce_scatter, f32.bytes.reduce_scatter);
  EXPECT_EQ(cast.bytes.all_gather, half.bytes.all_gather);
  EXPECT_EQ(cast.bytes.reduce_scatter, f32.bytes.reduce_scatter);
}

TEST(Precision, RejectsUnsupportedDtypes) {
  EXPECT_THROW(make_precision(DType::f64, {}), base::Unsupported);
  EXPECT_THROW(make_precision(DType::f32, DType::bf16), base::Unsupported);
  EXPECT_THROW(make_precision(DType::bf16, DType::f16), base::Unsupported);
}

TrainingRecord twenty_steps(DType dtype, std::optional<DType> reduce, double rate) {
  TrainingSpec spec;
  spec.steps = 20;
  spec.lr = rate;
  spec.dtype = dtype;
  spec.engine = engine_for("fsdp");
  spec.engine.reduce_dtype = reduce;
  return train(spec);
}

TEST(Precision, LossesStayCloseToF32) {
  const TrainingRecord f32 = twenty_steps(DType::f32, {}, 1e-3);
  for (const std::optional<DType> reduce : {std::optional<DType>(), std::optional(DType::f32)}) {
    const TrainingRecord half = twenty_steps(DType::bf16, reduce, 1e-3);
    for (std::size_t i = 0; i < f32.losses.size(); ++i)
      EXPECT_NEAR(half.losses[i], f32.losses[i], 0x1p-8 * f32.losses[i]) << i;
    EXPECT_NE(half.losses, f32.losses);
  }
}

float rounded(float value) { return static_cast<float>(base::bf16(value)); }

/// Steps smaller than the last place of a bf16 number add up in the master weights. The control: the same values
/// without master weights, rounded at each step, would not have moved.
TEST(Precision, MasterWeightsKeepSmallUpdates) {
  TrainingSpec spec;
  spec.steps = 20;
  spec.lr = 1e-5;  // AdamW moves an element by about that
  spec.dtype = DType::bf16;
  spec.engine = engine_for("zero2");
  spec.engine.optimizer.weight_decay = 0;
  spec.steps = 1;
  const std::vector<float> one = train(spec).parameters.at("ln_f.weight");
  spec.steps = 20;
  const std::vector<float> many = train(spec).parameters.at("ln_f.weight");
  int moved = 0;
  for (std::size_t i = 0; i < many.size(); ++i) {
    EXPECT_NE(one[i], 1.0F) << i;           // the master weights hold the first step ...
    EXPECT_EQ(rounded(one[i]), 1.0F) << i;  // ... which bf16 can't represent: without them each step begins at 1 again
    moved += std::abs(many[i] - 1.0F) > 2 * std::abs(one[i] - 1.0F) ? 1 : 0;
  }
  EXPECT_GT(moved, static_cast<int>(many.size() / 2));
}

/// Loaded values are stored in the master weights and read back unrounded; half-precision parameters are their
/// rounding.
TEST(Precision, LoadedValuesStayInF32) {
  for (const char* name : {"ddp", "zero1", "fsdp", "hsdp"}) {
    TrainingSpec spec = precision_spec(name, 4, {DType::bf16, {}});
    spec.steps = 1;
    const auto value = [](std::int64_t i) { return 1.0F + 1e-4F * static_cast<float>(i % 7); };
    spec.after_step = [&](int, int, Engine& engine, nn::CausalModel&) {
      engine.state().load([&](const fsdp::Parameter&, nn::ElementRange range, float* out) {
        for (std::int64_t i = range.begin; i < range.end; ++i) *out++ = value(i);
      });
    };
    for (const auto& [parameter, values] : train(spec).parameters)
      for (std::size_t i = 0; i < values.size(); ++i)
        ASSERT_EQ(values[i], value(static_cast<std::int64_t>(i))) << name << " " << parameter;
  }
}

}  // namespace
}  // namespace tessera::fsdp
