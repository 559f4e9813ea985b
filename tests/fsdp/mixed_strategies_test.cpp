// Several strategies in one model, and units with secondary shards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/nn/optimizer.h"
#include "tests/fsdp/training_specs.h"
#include "tests/harness/guarded_device.h"

namespace tessera::fsdp {
namespace {

using base::DType;
using base::MemoryCategory;
using harness::same_bits;
using harness::train;
using harness::TrainingRecord;
using testing::HasSubstr;

const SpecOptions kFourBlocks = {.layers = 4, .clip_norm = 0.5};

/// Units use the given strategies in turn.
TrainingSpec mixed_spec(int ranks, const std::vector<std::string>& names) {
  TrainingSpec spec = base_spec("fsdp", ranks, kFourBlocks);
  spec.engine.unit_strategy = [names](const UnitSpec& unit) -> std::optional<Strategy> {
    if (unit.is_root) return strategy_named(names[0]);
    const std::size_t number = unit.name.back() - '0';
    return strategy_named(names[number % names.size()]);
  };
  return spec;
}

const std::vector<std::string> kAll = {"ddp", "fsdp", "zero1", "zero2", "shard_grad_op"};

TEST(MixedStrategies, AreBitwiseEqualToEachAlone) {
  for (const int ranks : {1, 2, 3, 4}) {
    const TrainingRecord ddp = train(base_spec("ddp", ranks, kFourBlocks));
    for (const auto& names : {kAll, {"fsdp", "ddp"}, {"ddp", "fsdp"}, {"zero2", "ddp", "fsdp"}}) {
      TrainingSpec spec = mixed_spec(ranks, names);
      spec.lazy_streams = true;
      spec.engine.poison = true;
      EXPECT_TRUE(same_bits(ddp, train(spec))) << ranks << names[0] << names[1];
    }
  }
}

/// Each unit costs what its own strategy costs.
TEST(MixedStrategies, CostSumOfTheirFormulas) {
  const TrainingSpec spec = mixed_spec(3, kAll);
  const TrainingRecord record = train(spec);
  CommunicationFormula sum;
  ModelStateBytes state;
  for (std::size_t i = 0; i < record.units.size(); ++i) {
    const Strategy& strategy = record.units[i].strategy;
    const auto unit = std::span(record.unit_sizes).subspan(i, 1);
    const CommunicationFormula one = communication_formula(strategy, record.mesh, unit);
    for (const auto member : {&TrafficVolume::all_gather, &TrafficVolume::reduce_scatter, &TrafficVolume::all_reduce}) {
      sum.calls.*member += one.calls.*member;
      sum.bytes.*member += one.bytes.*member;
    }
    const ModelStateBytes bytes = model_state_formula(strategy, record.mesh, unit[0].padded, 2);
    state.parameter += bytes.parameter;
    state.gradient += bytes.gradient;
    state.optimizer += bytes.optimizer;
  }
  for (const EngineTraffic& rank : record.later_by_rank) {
    EXPECT_EQ(harness::calls_per_step(rank, spec.steps - 1), sum.calls);
    EXPECT_EQ(harness::bytes_per_step(rank, spec.steps - 1), sum.bytes);
  }
  for (const auto& bytes : record.model_state)
    EXPECT_EQ(bytes, (std::array{state.parameter, state.gradient, state.optimizer}));
  // The control: no strategy alone has these costs.
  for (const std::string& name : kAll)
    EXPECT_NE(communication_formula(strategy_named(name), record.mesh, record.unit_sizes).bytes, sum.bytes) << name;
}

/// Like PyTorch's ignored modules and its tests of DDP(A) + FSDP(B): the engine leaves ignored modules to the program.
TEST(MixedStrategies, IgnoredModulesBelongToProgram) {
  for (const char* name : {"ddp", "fsdp"}) {
    const TrainingSpec spec = base_spec(name, 2, kFourBlocks);
    comm::InitOptions config;
    config.backend = "shm";
    comm::run_threads(2, config, [&](comm::Communicator& world) {
      nn::Context context({.threads = 1, .memory_tracker = world.memory_tracker(), .memory = {}, .make_stream = {}});
      const auto model = nn::make_model(context, spec.model);
      nn::Module& own = model->find("h.1.mlp");
      own.materialize(5);
      EngineOptions options = spec.engine;
      options.ignored = [](const fsdp::Parameter& parameter) { return parameter.name().starts_with("h.1.mlp."); };
      Engine engine(*model, world, options);
      engine.initialize(0);
      EXPECT_EQ(engine.state().parameters().size() + own.parameters().size(), model->parameters().size());
      nn::Optimizer optimizer(own, {});
      const std::vector<float> before(own.parameters()[0]->tensor().data<float>(),
                                      own.parameters()[0]->tensor().data<float>() + 64);
      const auto batch = harness::make_batch(context, spec, 0, world.rank());
      harness::forward_backward(*model, batch);
      engine.step(1e-3);
      // No collective has reduced this gradient: each rank has that of its own batch.
      std::vector<float> gradient(2);
      const float mine = own.parameters()[0]->gradient().value().data<float>()[3];
      world.all_gather({&mine, 1, DType::f32, {}}, {gradient.data(), 2, DType::f32, {}}).wait();
      EXPECT_NE(gradient[0], gradient[1]);
      EXPECT_TRUE(std::equal(before.begin(), before.end(), own.parameters()[0]->tensor().data<float>()));
      optimizer.step(1e-3);
      EXPECT_FALSE(std::equal(before.begin(), before.end(), own.parameters()[0]->tensor().data<float>()));
      engine.state().for_each_parameter([](const fsdp::Parameter& parameter, std::span<const float>) {
        EXPECT_FALSE(parameter.name().starts_with("h.1.mlp.")) << parameter.name();
      });
    });
  }
}

TEST(MixedStrategies, RejectDifferentCollectives) {
  TrainingSpec spec = base_spec("fsdp", 2, kFourBlocks);
  spec.engine.unit_strategy = [](const UnitSpec&) {
    Strategy other = strategy_named("ddp");
    other.all_reduce = "another";
    return std::optional(other);
  };
  try {
    train(spec);
    FAIL();
  } catch (const base::InvalidUsage& error) {
    EXPECT_THAT(error.what(), HasSubstr("unit root: strategy ddp uses collective another but the engine uses plain"));
  }
}

// --- secondary shards

struct Case {
  const char* strategy;
  int ranks;
  const char* mesh;
  int to;
};

class ReshardGroup : public testing::TestWithParam<Case> {
 protected:
  static TrainingSpec spec() {
    return base_spec(GetParam().strategy, GetParam().ranks, {.layers = 4, .mesh = GetParam().mesh, .clip_norm = 0.5});
  }
};
INSTANTIATE_TEST_SUITE_P(Meshes, ReshardGroup,
                         testing::Values(Case{"fsdp", 4, "", 2}, Case{"fsdp", 4, "", 1}, Case{"fsdp", 4, "", 4},
                                         Case{"fsdp", 8, "", 2}, Case{"fsdp", 8, "", 4}, Case{"hsdp", 8, "2x4", 2},
                                         Case{"shard_grad_op", 4, "", 2}, Case{"zero1", 4, "", 2},
                                         Case{"zero2", 4, "", 2}),
                         [](const auto& test) {
                           return std::string(test.param.strategy) + "_" + std::to_string(test.param.ranks) + "_to_" +
                                  std::to_string(test.param.to);
                         });

TEST_P(ReshardGroup, IsBitwiseEqual) {
  TrainingSpec given = spec();
  const TrainingRecord over_all = train(given);
  given.engine.reshard_group_size = GetParam().to;
  given.engine.poison = true;
  given.lazy_streams = true;
  EXPECT_TRUE(same_bits(over_all, train(given)));
}

TEST_P(ReshardGroup, CostEqualsFormula) {
  for (const int microbatches : {1, 2}) {
    TrainingSpec given = spec();
    given.microbatches = microbatches;
    given.engine.clip_norm = 0;
    given.engine.reshard_group_size = GetParam().to;
    const TrainingRecord record = train(given);
    const StepShape shape{.microbatches = microbatches};
    const auto formula = communication_formula(record.strategy, record.mesh, record.unit_sizes, {}, shape);
    const PeakBounds peak = peak_formula(record.strategy, record.mesh, record.unit_sizes, shape);
    for (const EngineTraffic& rank : record.later_by_rank) {
      EXPECT_EQ(harness::calls_per_step(rank, given.steps - 1), formula.calls);
      EXPECT_EQ(harness::bytes_per_step(rank, given.steps - 1), formula.bytes);
    }
    for (const base::MemoryTracker::Snapshot& memory_tracker : record.memory_trackers)
      EXPECT_EQ(memory_tracker.peak_of(MemoryCategory::unsharded_parameter), peak.unsharded_parameter);
  }
}

/// The purpose of hpZ: gathers of backward stay inside the smaller groups.
TEST(ReshardGroup, MovesFewerBytesInBackwardOnly) {
  TrainingSpec spec = base_spec("fsdp", 4, kFourBlocks);
  spec.steps = 2;
  const std::uint64_t over_all = train(spec).all_later.all_gather.bytes_sent;
  spec.engine.reshard_group_size = 2;
  const TrainingRecord record = train(spec);
  std::uint64_t whole = 0, again = 0;
  for (const UnitSize& unit : record.unit_sizes) {
    whole += static_cast<std::uint64_t>(unit.padded) * 4;
    if (!unit.kept_after_forward) again += static_cast<std::uint64_t>(unit.padded) * 4;
  }
  EXPECT_EQ(over_all, whole / 4 * 3 + again / 4 * 3);
  EXPECT_EQ(record.all_later.all_gather.bytes_sent, whole / 4 * 3 + again / 2);
}

TEST(ReshardGroup, SupportsOffloadAndHalfPrecision) {
  TrainingSpec spec = base_spec("fsdp", 4, kFourBlocks);
  spec.model.layers = 2;
  spec.steps = 2;
  spec.dtype = DType::bf16;
  spec.engine.reduce_dtype = DType::f32;
  const TrainingRecord host = train(spec);
  spec.engine.reshard_group_size = 2;
  spec.runtime = harness::make_guarded_device({.lazy = true});
  spec.engine.cpu_offload = true;
  EXPECT_TRUE(same_bits(host, train(spec)));
}

TEST(ReshardGroup, RejectsInvalidSizes) {
  const auto refused = [](const std::function<void(EngineOptions&)>& set, const std::string& what) {
    TrainingSpec spec = base_spec("fsdp", 4, kFourBlocks);
    set(spec.engine);
    try {
      train(spec);
      ADD_FAILURE() << "not refused: " << what;
    } catch (const base::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(what));
    }
  };
  refused([](EngineOptions& options) { options.reshard_group_size = 3; }, "does not divide the 4 shards");
  refused([](EngineOptions& options) { options.reshard_group_size = -1; }, "does not divide the 4 shards");
  refused(
      [](EngineOptions& options) {
        options.reshard_group_size = 2;
        options.reshard_after_forward = true;
      },
      "set only one of them");
  refused(
      [](EngineOptions& options) {
        options.mesh = MeshShape{{{kGroupAxis, 2}, {kShardAxis, 2}}};
        options.strategy = over_groups(options.strategy);
        options.strategy.param_after_forward = {kGroupAxis};
      },
      "can stay sharded only over inner axes");
}

}  // namespace
}  // namespace tessera::fsdp
