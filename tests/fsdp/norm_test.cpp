// Gradient norms, clipping, and the f16 loss scale.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "tessera/fsdp/gradient_scaler.h"
#include "tests/fsdp/training_specs.h"

namespace tessera::fsdp {
namespace {

using base::DType;
using harness::same_bits;
using harness::train;
using harness::TrainingRecord;
using nn::kernels::Norm;

constexpr Norm kNorms[] = {Norm::one, Norm::two, Norm::three, Norm::infinity};

TrainingSpec norm_spec(const std::string& strategy, int ranks, Norm norm, double clip) {
  TrainingSpec spec = base_spec(strategy, ranks, {.layers = 1, .clip_norm = clip});
  spec.global_batch = 12;
  spec.engine.norm = norm;
  spec.engine.measure_norm = true;
  return spec;
}

/// Norm of the full gradients of one rank, in double.
double norm_of(nn::CausalModel& model, Norm norm) {
  double total = 0;
  for (const auto& parameter : model.parameters()) {
    const nn::Tensor& gradient = parameter->gradient().value();
    for (std::int64_t i = 0; i < gradient.count(); ++i) {
      const double magnitude = std::abs(static_cast<double>(gradient.data<float>()[i]));
      if (norm == Norm::one) total += magnitude;
      if (norm == Norm::two) total += magnitude * magnitude;
      if (norm == Norm::three) total += magnitude * magnitude * magnitude;
      if (norm == Norm::infinity) total = std::max(total, magnitude);
    }
  }
  if (norm == Norm::two) return std::sqrt(total);
  return norm == Norm::three ? std::cbrt(total) : total;
}

TEST(GradNorm, EqualsNormOfFullGradient) {
  for (const Norm norm : kNorms) {
    TrainingSpec spec = norm_spec("ddp", 1, norm, 0);
    spec.drains = true;  // the norm of the first step
    nn::Context context;
    const auto model = nn::make_model(context, spec.model);
    model->materialize(spec.seed);
    const auto batch = harness::make_batch(context, spec, 0, 0);
    harness::forward_backward(*model, batch);
    const double whole = norm_of(*model, norm);
    EXPECT_NEAR(train(spec).norms[0], whole, 1e-9 * whole) << static_cast<int>(norm);
    for (const char* strategy : {"zero2", "fsdp"}) {
      spec = norm_spec(strategy, 3, norm, 0);  // equal up to the rounding of sums over three ranks
      spec.drains = true;
      EXPECT_NEAR(train(spec).norms[0], whole, 1e-5 * whole) << strategy << static_cast<int>(norm);
    }
  }
}

TEST(GradNorm, ClippingIsBitwiseEqualAcrossStrategies) {
  for (const Norm norm : kNorms)
    for (const int ranks : {2, 3, 4}) {
      const double clip = 0.5 * train(norm_spec("ddp", ranks, norm, 0)).norms[0];
      const TrainingRecord ddp = train(norm_spec("ddp", ranks, norm, clip));
      for (const char* name : {"zero1", "zero2", "fsdp", "hsdp"}) {
        if (std::string(name) == "hsdp" && ranks % 2 != 0) continue;
        EXPECT_TRUE(same_bits(ddp, train(norm_spec(name, ranks, norm, clip)))) << name << static_cast<int>(norm);
      }
      // The control: clipping by another norm differs.
      EXPECT_FALSE(same_bits(ddp, train(norm_spec("ddp", ranks, norm == Norm::one ? Norm::two : Norm::one, clip))));
    }
}

TEST(GradNorm, CostsOneReductionPerShardedAxis) {
  for (const Norm norm : kNorms)
    for (const auto& [name, ranks, calls] :
         {std::tuple("ddp", 3, 0U), std::tuple("zero1", 2, 1U), std::tuple("fsdp", 3, 1U), std::tuple("hsdp", 4, 1U)}) {
      const TrainingSpec spec = norm_spec(name, ranks, norm, 0.5);
      for (const EngineTraffic& rank : train(spec).later_by_rank)
        EXPECT_EQ(rank.control.calls, (calls + 1) * static_cast<unsigned>(spec.steps - 1))
            << name;  // one compares the execution order
    }
}

// --- the loss scale

/// Trains in f16 with a scaler.
struct Scaled {
  std::vector<bool> done;
  std::vector<double> scales, losses;
  Values before, after;  // parameters around the spoiled step
  Values end;
  std::uint64_t skipped = 0;
};

/// The steps from `first` to before `end`; in the steps of `spoils` one rank's loss is infinite.
struct Steps {
  std::set<int> spoils;
  int first = 0, end = 6;
};

Scaled train_scaled(const std::string& strategy, int ranks, const Steps& steps, GradientScaler::Options options) {
  Scaled scaled;
  comm::InitOptions config;
  config.backend = "shm";
  config.timeout = std::chrono::seconds(60);
  TrainingSpec spec = norm_spec(strategy, ranks, Norm::two, 0);
  spec.engine.use_loss_scaling = true;
  comm::run_threads(ranks, config, [&](comm::Communicator& world) {
    nn::Context context({.threads = 1, .memory_tracker = world.memory_tracker(), .memory = {}, .make_stream = {}});
    const auto model = nn::make_model(context, spec.model);
    model->set_dtype(DType::f16);
    Engine engine(*model, world, spec.engine);
    engine.initialize(spec.seed);
    GradientScaler scaler(engine, options);
    const bool first = world.rank() == 0;
    for (int step = steps.first; step < steps.end; ++step) {
      const auto batch = harness::make_batch(context, spec, step, world.rank());
      nn::Tape tape;
      nn::Tensor loss;
      {
        const nn::TapeScope recording(context, &tape);
        loss = model->loss(batch.tokens, batch.targets);
      }
      const bool spoiled = steps.spoils.contains(step);
      const bool spoils = spoiled && world.rank() == ranks - 1;
      tape.backward(loss, spoils ? std::numeric_limits<double>::infinity() : scaler.scale());
      if (spoiled) {
        const auto values = values_of(engine);
        if (first) scaled.before = values;
      }
      engine.step(1e-2);
      const bool done = scaler.after_step();
      if (spoiled) {
        const auto values = values_of(engine);
        if (first) scaled.after = values;
      }
      if (!first) continue;
      scaled.done.push_back(done);
      scaled.scales.push_back(scaler.scale());
      scaled.losses.push_back(loss.item());
    }
    const auto values = values_of(engine);
    if (first) scaled.end = values;
    if (first) scaled.skipped = engine.skipped_steps();
  });
  return scaled;
}

/// Sums for every reduction, also if the average is requested.
class SumsFirst final : public CollectivePlugin {
 public:
  explicit SumsFirst(comm::OpKind kind) : kind_(kind) {}
  WorkChain run(const CollectiveCall& call) override {
    WorkChain works;
    for (const FlatTransfer& t : call.transfers)
      works.add(kind_ == comm::OpKind::all_reduce
                    ? call.channel.all_reduce(t.in, t.out, comm::ReduceOp::sum(), call.options)
                    : call.channel.reduce_scatter(t.in, t.out, comm::ReduceOp::sum(), call.options));
    return works;
  }

 private:
  const comm::OpKind kind_;
};

TEST(GradientScaling, InfinityOnOneRankSkipsStepAndBacksOffOnAll) {
  for (const auto& [name, ranks] : {std::pair("ddp", 2), std::pair("zero1", 2), std::pair("zero2", 3),
                                    std::pair("fsdp", 4), std::pair("hsdp", 4)}) {
    const Scaled scaled = train_scaled(name, ranks, {.spoils = {2}}, {.initial = 1024});
    EXPECT_THAT(scaled.done, testing::ElementsAre(true, true, false, true, true, true)) << name;
    EXPECT_THAT(scaled.scales, testing::ElementsAre(1024, 1024, 512, 512, 512, 512)) << name;
    EXPECT_EQ(scaled.before, scaled.after) << name;
    EXPECT_EQ(scaled.skipped, 1U) << name;
    // The control: a step without overflow changes them.
    const Scaled whole = train_scaled(name, ranks, {}, {.initial = 1024});
    EXPECT_THAT(whole.done, testing::Each(true));
    EXPECT_LT(whole.losses.back(), whole.losses.front());
  }
}

TEST(GradientScaling, PowerOfTwoScalesChangeOnlyUnderflow) {
  const Scaled small = train_scaled("fsdp", 2, {}, {.initial = 1024}),
               large = train_scaled("fsdp", 2, {}, {.initial = 4096});
  for (std::size_t i = 0; i < small.losses.size(); ++i) EXPECT_NEAR(small.losses[i], large.losses[i], 2e-3);
}

TEST(GradientScaling, GrowsAfterInterval) {
  const Scaled scaled = train_scaled("fsdp", 2, {.spoils = {2}}, {.initial = 1024, .interval = 2});
  EXPECT_THAT(scaled.scales, testing::ElementsAre(1024, 2048, 1024, 1024, 2048, 2048));
}

TEST(GradientScaling, GrowsRepeatedlyAndOverflowRestartsInterval) {
  const Scaled grown = train_scaled("ddp", 2, {}, {.initial = 16, .interval = 2});
  EXPECT_THAT(grown.scales, testing::ElementsAre(16, 32, 32, 64, 64, 128));
  // Two good steps before the overflow don't count toward the three after it.
  const Scaled anew = train_scaled("ddp", 2, {.spoils = {2}}, {.initial = 1024, .interval = 3});
  EXPECT_THAT(anew.scales, testing::ElementsAre(1024, 1024, 512, 512, 512, 1024));
}

TEST(GradientScaling, StaysWithinBounds) {
  const Scaled small = train_scaled("ddp", 1, {.spoils = {0, 1, 2, 3}, .end = 5}, {.initial = 0x1p-22});
  EXPECT_THAT(small.scales, testing::ElementsAre(0x1p-23, 0x1p-24, 0x1p-24, 0x1p-24, 0x1p-24));
  EXPECT_THAT(small.done, testing::ElementsAre(false, false, false, false, true));
}

/// A skipped step does not count for the optimizer: the rest equals a training without that step.
TEST(GradientScaling, OptimizerDoesNotCountSkippedSteps) {
  for (const char* name : {"ddp", "fsdp"}) {
    const Scaled with = train_scaled(name, 2, {.spoils = {0}}, {.initial = 1024});
    const Scaled without = train_scaled(name, 2, {.first = 1}, {.initial = 512});
    EXPECT_FALSE(with.end.empty());
    EXPECT_EQ(with.end, without.end) << name;
    // The control: a step that isn't skipped.
    EXPECT_NE(train_scaled(name, 2, {}, {.initial = 512}).end, without.end) << name;
  }
}

TEST(GradientScaling, RejectsInvalidOptions) {
  TrainingSpec spec = norm_spec("fsdp", 1, Norm::two, 0);
  spec.before_training = [](Engine& engine, comm::Communicator&) {
    EXPECT_THROW(engine.set_loss_scale(2), base::InvalidUsage);
    EXPECT_THROW(GradientScaler{engine}, base::InvalidUsage);
  };
  train(spec);
  spec.engine.use_loss_scaling = true;
  spec.before_training = [](Engine& engine, comm::Communicator&) {
    EXPECT_THROW(engine.set_loss_scale(0), base::InvalidUsage);
    EXPECT_THROW(engine.set_loss_scale(INFINITY), base::InvalidUsage);
    EXPECT_THROW(GradientScaler(engine, {.growth = 0.5}), base::InvalidUsage);
  };
  train(spec);
}

/// Largest gradient of one backward; every rank has the same batch. Not finite if any gradient is not finite.
double largest_gradient(const std::string& strategy, int ranks, double scale, const std::string& reducer) {
  TrainingSpec spec = norm_spec(strategy, ranks, Norm::infinity, 0);
  spec.ranks = 1;  // all ranks use the batch of one rank
  spec.engine.use_loss_scaling = true;
  double largest = 0;
  comm::InitOptions config;
  config.backend = "shm";
  comm::run_threads(ranks, config, [&](comm::Communicator& world) {
    nn::Context context({.threads = 1, .memory_tracker = world.memory_tracker(), .memory = {}, .make_stream = {}});
    const auto model = nn::make_model(context, spec.model);
    model->set_dtype(DType::f16);
    EngineOptions options = spec.engine;
    for (const auto kind : {comm::OpKind::reduce_scatter, comm::OpKind::all_reduce})
      options.collectives.add(kind, "sums_first", [kind] { return std::make_unique<SumsFirst>(kind); });
    options.strategy.reduce_scatter = options.strategy.all_reduce = reducer;
    Engine engine(*model, world, options);
    engine.initialize(0);
    engine.set_loss_scale(scale);
    const auto batch = harness::make_batch(context, spec, 0, 0);
    harness::forward_backward(*model, batch, scale);
    engine.step(0);
    const double norm = engine.grad_norm();
    if (world.rank() == 0) largest = norm * scale;
  });
  return largest;
}

/// Four gradients of 40000 exceed the range of f16; their mean doesn't.
TEST(GradientScaling, AveragesInRangeDoNotOverflow) {
  const double scale = 40000 / largest_gradient("ddp", 1, 1, "plain");
  for (const char* name : {"ddp", "zero1", "zero2", "fsdp", "hsdp"}) {
    EXPECT_NEAR(largest_gradient(name, 4, scale, "plain"), 40000, 400) << name;
    // The control: a reduction that divides after the sum.
    EXPECT_FALSE(std::isfinite(largest_gradient(name, 4, scale, "sums_first"))) << name;
  }
}

}  // namespace
}  // namespace tessera::fsdp
