// Gradient accumulation: bitwise equal under all strategies, and the cost of each kind of reduction.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

constexpr int kMicrobatches = 3;

TrainingSpec accumulating(const std::string& strategy, int ranks, Accumulation accumulation,
                          const std::string& mesh = "") {
  TrainingSpec spec = base_spec(strategy, ranks, {.mesh = mesh});
  spec.microbatches = kMicrobatches;
  spec.global_batch = kMicrobatches * ranks;
  spec.engine.strategy = with_accumulation(spec.engine.strategy, accumulation);
  spec.engine.measure_norm = true;
  return spec;
}

struct Precise {
  DType compute = DType::f32;
  std::optional<DType> reduce = {};
};

void set_precision(TrainingSpec& spec, const Precise& precision) {
  spec.dtype = precision.compute;
  spec.engine.reduce_dtype = precision.reduce;
}

constexpr Precise kPrecisions[] = {{}, {DType::bf16, DType::f32}, {DType::bf16, {}}};

class AccumulationModes : public testing::TestWithParam<std::tuple<Accumulation, int>> {};
INSTANTIATE_TEST_SUITE_P(All, AccumulationModes,
                         testing::Combine(testing::Values(Accumulation::every, Accumulation::last),
                                          testing::Values(1, 2, 3, 4)));

TEST_P(AccumulationModes, StrategiesAreBitwiseEqual) {
  const auto [accumulation, ranks] = GetParam();
  for (const Precise& precision : kPrecisions) {
    TrainingSpec spec = accumulating("ddp", ranks, accumulation);
    set_precision(spec, precision);
    const TrainingRecord ddp = train(spec);
    for (const char* name : {"zero1", "zero2", "fsdp", "shard_grad_op", "hsdp"}) {
      const bool two_stages = std::string(name) == "hsdp";
      if (two_stages && (ranks % 2 != 0 || (precision.compute != DType::f32 && !precision.reduce))) continue;
      spec = accumulating(name, ranks, accumulation);
      set_precision(spec, precision);
      spec.lazy_streams = true;
      spec.engine.poison = true;
      EXPECT_TRUE(same_bits(ddp, train(spec))) << name;
    }
  }
}

TEST(Accumulation, KeepingUnitsUnshardedIsBitwiseEqual) {
  TrainingSpec spec = accumulating("fsdp", 2, Accumulation::last);
  const TrainingRecord base = train(spec);
  spec.engine.reshard_after_backward = false;
  spec.engine.poison = true;
  EXPECT_TRUE(same_bits(base, train(spec)));
}

/// The reference is one backward over as many sequences, with an optimizer that reveals a wrong scale.
TEST(Accumulation, EqualsOneLargeBatchUpToRounding) {
  for (const Accumulation accumulation : {Accumulation::every, Accumulation::last, Accumulation::scatter}) {
    TrainingSpec spec = accumulating("hsdp", 4, accumulation, "2x2");
    spec.engine.optimizer.kind = nn::OptimizerConfig::Kind::sgd;
    spec.lr = 0.1;
    spec.steps = 6;
    spec.drains = true;  // the norms of all steps
    const TrainingRecord accumulated = train(spec);
    spec.microbatches = 1;
    const TrainingRecord whole = train(spec);
    for (std::size_t i = 0; i < whole.losses.size(); ++i) {
      EXPECT_NEAR(accumulated.losses[i], whole.losses[i], 3e-6 * whole.losses[i]) << i;
      EXPECT_NEAR(accumulated.norms[i], whole.norms[i], 1e-5 * whole.norms[i]) << i;
    }
  }
}

/// Negative control: a step without its first microbatch is not equal.
TEST(Accumulation, DetectsLostMicrobatch) {
  TrainingSpec spec = accumulating("fsdp", 2, Accumulation::every);
  const TrainingRecord right = train(spec);
  spec.after_backward = [](int, int, Engine&, nn::CausalModel& model) {
    EXPECT_FALSE(model.parameters()[0]->gradient().bound());
  };
  EXPECT_TRUE(same_bits(right, train(spec)));
  spec.microbatches = 1;
  spec.global_batch /= kMicrobatches;
  EXPECT_GT(std::abs(right.norms[0] - train(spec).norms[0]), 1e-3 * right.norms[0]);
}

// --- cost

struct Case {
  const char* strategy;
  int ranks;
  const char* mesh;
};

class AccumulationCost : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Strategies, AccumulationCost,
                         testing::Values(Case{"ddp", 3, ""}, Case{"zero1", 2, ""}, Case{"zero2", 3, ""},
                                         Case{"fsdp", 1, ""}, Case{"fsdp", 3, ""}, Case{"shard_grad_op", 2, ""},
                                         Case{"hsdp", 4, "2x2"}, Case{"hsdp", 4, "4x1"}),
                         [](const auto& test) {
                           return std::string(test.param.strategy) + "_" + std::to_string(test.param.ranks) + "_" +
                                  test.param.mesh;
                         });

void expect_formulas(const TrainingSpec& spec) {
  const TrainingRecord record = train(spec);
  const StepShape shape{.microbatches = spec.microbatches,
                        .reshard_after_backward = spec.engine.reshard_after_backward};
  const Precision precision = make_precision(spec.dtype, spec.engine.reduce_dtype);
  const auto formula = communication_formula(spec.engine.strategy, record.mesh, record.unit_sizes, precision, shape);
  const PeakBounds peak = peak_formula(spec.engine.strategy, record.mesh, record.unit_sizes, shape, precision);
  for (const EngineTraffic& rank : record.later_by_rank) {
    EXPECT_EQ(harness::calls_per_step(rank, spec.steps - 1), formula.calls);
    EXPECT_EQ(harness::bytes_per_step(rank, spec.steps - 1), formula.bytes);
  }
  for (const base::MemoryTracker::Snapshot& memory_tracker : record.memory_trackers) {
    EXPECT_EQ(memory_tracker.peak_of(MemoryCategory::unsharded_gradient), peak.unsharded_gradient);
    EXPECT_EQ(memory_tracker.peak_of(MemoryCategory::unsharded_parameter), peak.unsharded_parameter);
    EXPECT_EQ(memory_tracker.now_of(MemoryCategory::unsharded_gradient), 0u);
  }
}

TEST_P(AccumulationCost, CallsBytesAndPeaksEqualFormula) {
  for (const Accumulation accumulation : {Accumulation::every, Accumulation::last, Accumulation::scatter})
    for (const std::optional<bool> reshard : {std::optional<bool>(), std::optional(true), std::optional(false)})
      for (const bool after_backward : {true, false}) {
        SCOPED_TRACE(testing::Message() << "way " << static_cast<int>(accumulation) << " reshard "
                                        << (reshard ? (*reshard ? "true" : "false") : "default") << " after backward "
                                        << after_backward);
        TrainingSpec spec = accumulating(GetParam().strategy, GetParam().ranks, accumulation, GetParam().mesh);
        spec.steps = 2;
        spec.engine.reshard_after_forward = reshard;
        spec.engine.reshard_after_backward = after_backward;
        expect_formulas(spec);
        spec.dtype = DType::bf16;
        spec.engine.reduce_dtype = DType::f32;
        expect_formulas(spec);
      }
}

/// Negative control: one microbatch more than in the formula is detected.
TEST(Accumulation, DetectsAdditionalMicrobatch) {
  const TrainingSpec spec = accumulating("fsdp", 2, Accumulation::every);
  const TrainingRecord record = train(spec);
  const auto formula = communication_formula(spec.engine.strategy, record.mesh, record.unit_sizes, {},
                                             {.microbatches = kMicrobatches - 1});
  EXPECT_NE(harness::bytes_per_step(record.later_by_rank[0], spec.steps - 1), formula.bytes);
}

TEST(Accumulation, ReducesInConfiguredMicrobatches) {
  using base::TraceEventKind;
  const auto reductions = [](Accumulation accumulation) {
    TrainingSpec spec = accumulating("hsdp", 4, accumulation, "2x2");
    const TrainingRecord record = train(spec);
    return std::count_if(record.last_events.begin(), record.last_events.end(),
                         [](const base::TraceEvent& event) { return event.kind == TraceEventKind::reduce_issue; });
  };
  const int units = 4;
  EXPECT_EQ(reductions(Accumulation::every), 2 * units * kMicrobatches);
  EXPECT_EQ(reductions(Accumulation::last), 2 * units);
  EXPECT_EQ(reductions(Accumulation::scatter), units * kMicrobatches + units);
}

// --- CPU offload

TEST(Accumulation, CpuOffloadIsBitwiseEqual) {
  for (const Accumulation accumulation : {Accumulation::every, Accumulation::last, Accumulation::scatter})
    for (const char* name : {"zero2", "fsdp", "hsdp"})
      for (const Precise& precision : {Precise{}, Precise{DType::bf16, DType::f32}}) {
        TrainingSpec spec = accumulating(name, std::string(name) == "hsdp" ? 4 : 2, accumulation);
        spec.model.layers = 1;
        spec.microbatches = 2;
        spec.steps = 2;
        set_precision(spec, precision);
        const TrainingRecord host = train(spec);
        spec.runtime = harness::make_guarded_device({.lazy = true});
        spec.engine.poison = true;
        spec.engine.cpu_offload = true;
        EXPECT_TRUE(same_bits(host, train(spec))) << name;
      }
}

// --- order

void expect_refused(const std::function<void(Engine&, nn::CausalModel&)>& first, const std::string& what) {
  TrainingSpec spec = accumulating("fsdp", 2, Accumulation::every);
  spec.steps = 1;
  spec.after_step = [&](int, int, Engine& engine, nn::CausalModel& model) {
    try {
      first(engine, model);
      ADD_FAILURE() << "not refused: " << what;
    } catch (const base::InvalidUsage& error) {
      EXPECT_THAT(error.what(), HasSubstr(what));
    }
    engine.abort_step();
  };
  train(spec);
}

void one_backward(nn::CausalModel& model, int rank) {
  const TrainingSpec spec = accumulating("fsdp", 2, Accumulation::every);
  const auto batch = harness::make_batch(model.context(), spec, 0, rank);
  harness::forward_backward(model, batch);
}

TEST(Accumulation, RejectsCallsOutOfOrder) {
  expect_refused([](Engine& engine, nn::CausalModel&) { engine.step(1e-3); },
                 "step: no gradients; run a backward of the whole model first");
  expect_refused(
      [](Engine& engine, nn::CausalModel& model) {
        engine.set_is_last_backward(false);
        one_backward(model, 0);
        engine.step(1e-3);
      },
      "step: gradients are incomplete; call set_is_last_backward(true)");
  expect_refused(
      [](Engine& engine, nn::CausalModel& model) {
        engine.set_is_last_backward(true);
        one_backward(model, 0);
        one_backward(model, 0);
      },
      "backward: this step's gradients are complete");
}

TEST(Accumulation, RejectsImpossibleModes) {
  Strategy odd = strategy_named("hsdp");
  odd.sync[kShardAxis].when = Sync::When::step;  // and replicas every microbatch
  TrainingSpec spec = accumulating("hsdp", 4, Accumulation::every, "2x2");
  spec.engine.strategy = odd;
  try {
    train(spec);
    FAIL();
  } catch (const base::Unsupported& error) {
    EXPECT_THAT(error.what(), HasSubstr("axis replicate every microbatch"));
  }
  EXPECT_THROW(parse_accumulation("sometimes"), base::InvalidUsage);
}

}  // namespace
}  // namespace tessera::fsdp
