// A simulation has the same calls, bytes, memory and events as a real training, and the times of the formulas.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>

#include "tessera/nn/layers/linear.h"
#include "tests/harness/training.h"
#include "tests/plan/simulation_support.h"

namespace tessera::plan {
namespace {

using namespace fsdp;  // and of base
using base::MemoryCategory;
using harness::engine_for;
using std::chrono::nanoseconds;
using testing::HasSubstr;
using testing::ThrowsMessage;

/// Cost model in which every kernel that `step` calls takes no time.
KernelCostModel no_time(const TrainingStep& step, int steps = 1) {
  KernelCostModel times;
  std::mutex mutex;
  comm::run_threads(2, {.backend = "shm"}, [&](comm::Communicator& world) {
    const StepProfile record = profile_step(step, world, steps);
    const std::lock_guard lock(mutex);
    times = record.kernels.scaled(0);
  });
  return times;
}

Network microseconds_each(int microseconds) {
  return fixed_times([=](const SimulatedOp&) { return std::chrono::microseconds(microseconds); });
}

/// Sync period of the strategies that have one.
constexpr int kPeriod = 4;

EngineOptions engine_of(const std::string& name) {
  EngineOptions engine = engine_for(name);
  for (auto& [axis, sync] : engine.strategy.sync)
    if (sync.period > 1) sync.period = kPeriod;
  return engine;
}

int steps_of(const Strategy& strategy) { return periodic_axis(strategy).empty() ? 1 : kPeriod; }

TEST(StepPrediction, CallsAndBytesEqualFormulasOnAnyWorld) {
  for (const std::string& name : strategy_names()) {
    const TrainingStep step = step_of(config_of(3, 32), engine_of(name));
    const Strategy& strategy = step.engine.strategy;
    const int steps = steps_of(strategy);
    const KernelCostModel kernels = no_time(step, 1 + steps);
    for (const int ranks : {1, 2, 4, 6, 64, 1024}) {
      const StepProfile record = predict_on(ranks, step, kernels, microseconds_each(1), steps);
      const auto formula_of = [&](int n) {
        return communication_formula(strategy, default_mesh(strategy, n, n), record.unit_sizes);
      };
      EXPECT_EQ(harness::calls_per_step(record.traffic, steps), formula_of(ranks).calls) << name << " " << ranks;
      EXPECT_EQ(harness::bytes_per_step(record.traffic, steps), formula_of(ranks).bytes) << name << " " << ranks;
      // The control: those of another world size differ.
      EXPECT_FALSE(harness::bytes_per_step(record.traffic, steps) == formula_of(2 * ranks).bytes) << name << ranks;
    }
  }
}

struct Seen {
  base::TraceEventKind kind;
  std::string unit;
  std::uint64_t bytes;
  bool operator==(const Seen&) const = default;
};

std::vector<Seen> seen(const std::vector<TraceEvent>& events) {
  std::vector<Seen> all;
  for (const TraceEvent& event : events) all.push_back({event.kind, event.unit, event.bytes});
  return all;
}

TEST(StepPrediction, EventsAndMemoryEqualRealTraining) {
  for (const std::string& name : strategy_names())
    for (const int microbatches : {1, 2}) {
      EngineOptions engine = engine_for(name);
      engine.clip_norm = 1;
      engine.prefetch = 2;
      TrainingStep step = step_of(config_of(4, 32), engine);
      step.microbatches = microbatches;
      const StepProfile real = measured_on(4, "shm", step, 2);
      const StepProfile predicted = predict_on(4, step, real.kernels, microseconds_each(1));
      EXPECT_TRUE(seen(real.steps.back().events) == seen(predicted.steps.back().events)) << name;
      for (const MemoryCategory use :
           {MemoryCategory::parameter, MemoryCategory::gradient, MemoryCategory::optimizer, MemoryCategory::activation,
            MemoryCategory::unsharded_parameter, MemoryCategory::unsharded_gradient})
        EXPECT_EQ(real.memory.peak_of(use), predicted.memory.peak_of(use)) << name << " " << base::name_of(use);
      // The control: another prefetch gives another order of events if the strategy gathers.
      step.engine.prefetch = 0;
      const StepProfile other = predict_on(4, step, real.kernels, microseconds_each(1));
      const bool gathers = name == "fsdp" || name == "hsdp" || name == "shard_grad_op";
      EXPECT_NE(seen(other.steps.back().events) == seen(real.steps.back().events), gathers) << name;
    }
}

class Fp8Prediction : public testing::TestWithParam<nn::Fp8Scaling> {};
INSTANTIATE_TEST_SUITE_P(Scaling, Fp8Prediction,
                         testing::Values(nn::Fp8Scaling::current, nn::Fp8Scaling::delayed, nn::Fp8Scaling::none));

TEST_P(Fp8Prediction, MemoryIsExact) {
  for (const char* name : {"ddp", "fsdp"}) {
    EngineOptions engine = engine_for(name);
    engine.clip_norm = 0.5;
    engine.reduce_dtype = base::DType::f32;
    if (GetParam() == nn::Fp8Scaling::delayed) engine.buffers = BufferSync::maximum;
    TrainingStep step = step_of(config_of(2, 32), engine);
    step.samples = 6;
    step.make_task = [scaling = GetParam()](nn::Context& context) {
      auto model = nn::make_model(context, config_of(2, 32));
      model->set_dtype(base::DType::bf16);
      EXPECT_EQ(nn::use_fp8(*model, scaling), 8) << "four in each block, and not the head";
      return make_token_task(std::move(model), 16);
    };
    const StepProfile real = measured_on(2, "shm", step, 2);
    const StepProfile predicted = predict_on(2, step, real.kernels, microseconds_each(1));
    for (const MemoryCategory use :
         {MemoryCategory::activation, MemoryCategory::parameter, MemoryCategory::unsharded_parameter})
      EXPECT_EQ(real.memory.peak_of(use), predicted.memory.peak_of(use)) << name << " " << base::name_of(use);
  }
}

/// As on a GPU, whose kernels need rows of logits of a multiple of 128 elements.
TEST(StepPrediction, LogitsOfDevicesArePadded) {
  nn::ModelConfig config = config_of(2, 32);
  const auto activations = [&](VirtualClock::Machine machine) {
    const TrainingStep step = step_of(config, engine_for("ddp"));
    return predict_on(2, step, no_time(step), microseconds_each(1), 1, machine)
        .memory.peak_of(MemoryCategory::activation);
  };
  const auto host = VirtualClock::Machine::synchronous, device = VirtualClock::Machine::asynchronous;
  EXPECT_EQ(activations(device), activations(host)) << "256 tokens fill the rows";
  config.vocabulary = 257;
  const std::uint64_t padding = 2 * 16 * (384 - 257) * sizeof(float);
  EXPECT_EQ(activations(device), activations(host) + padding);
}

/// Without compute time the times of sequential collectives add up.
TEST(StepPrediction, TimesEqualFormulas) {
  const TrainingStep ddp = step_of(config_of(3, 32), engine_for("ddp"));
  const KernelCostModel none = no_time(ddp);
  const StepProfile reduced = predict_on(8, ddp, none, microseconds_each(100));
  EXPECT_EQ(reduced.steps.back().step_ns, static_cast<std::int64_t>(reduced.unit_sizes.size()) * 100'000);
  EXPECT_EQ(reduced.steps.back().exposed_ns, reduced.steps.back().step_ns);

  // The opposite: collectives that take no time are never waited for, and a step takes the time of its kernels.
  const StepProfile real = measured_on(1, "shm", ddp, 2);
  const StepProfile alone = predict_on(1, ddp, real.kernels, microseconds_each(100));
  const StepProfile fast = predict_on(8, ddp, real.kernels, microseconds_each(0));
  EXPECT_EQ(fast.steps.back().exposed_ns, 0);
  EXPECT_GT(fast.steps.back().step_ns, 0);
  EXPECT_EQ(fast.steps.back().step_ns, alone.steps.back().step_ns);
  const StepProfile slower = predict_on(8, ddp, real.kernels.scaled(2), microseconds_each(0));
  EXPECT_NEAR(static_cast<double>(slower.steps.back().step_ns), 2.0 * static_cast<double>(fast.steps.back().step_ns),
              1000);
}

/// On a device the host runs ahead: work that no stream waits for costs nothing.
TEST(StepPrediction, DeviceStreamsOverlap) {
  EngineOptions engine = engine_for("fsdp");
  engine.prefetch = 1;
  const TrainingStep step = step_of(config_of(6, 32), engine);
  const StepProfile real = measured_on(1, "shm", step, 2);
  const auto exposed = [&](VirtualClock::Machine machine, int prefetch) {
    TrainingStep one = step;
    one.engine.prefetch = prefetch;
    // Collectives take longer than any unit's compute.
    return predict_on(4, one, real.kernels.scaled(0.01), microseconds_each(1000), 1, machine).steps.back().exposed_ns;
  };
  EXPECT_LE(exposed(VirtualClock::Machine::asynchronous, 1), exposed(VirtualClock::Machine::synchronous, 1));
  EXPECT_LT(exposed(VirtualClock::Machine::synchronous, 1), exposed(VirtualClock::Machine::synchronous, 0));
}

/// Gathers of updated parameters hide behind the next forward; nothing else passes from step to step.
TEST(StepPrediction, ContinuousStepsHideGathersOfUpdatedParameters) {
  constexpr std::int64_t kGather = 1'000'000, kForward = 100'000;  // of a unit, in ns
  const auto network =
      fixed_times([](const SimulatedOp& op) { return nanoseconds(op.kind == comm::OpKind::all_gather ? kGather : 0); });
  const auto step_ns = [&](const char* strategy, bool continuous, int steps) {
    TrainingStep step = step_of(config_of(3, 32), engine_for(strategy));
    step.continuous = continuous;
    VirtualClock clock(VirtualClock::Machine::synchronous);
    const auto world = make_world(2, clock, network);
    const auto kernels = [](const nn::KernelInvocation& call) {
      return call.kernel == "attention_forward" ? 1e-9 * static_cast<double>(kForward) : 0;
    };
    const StepTimes last = predict_step(step, *world, clock, kernels, steps).steps.back();
    EXPECT_EQ(last.exposed_ns, last.step_ns - 3 * kForward) << strategy << ": the rest of the step waits";
    return last.step_ns;
  };
  // Root and three blocks: gathers one after the other. The forwards of the first two blocks hide a part of them, that
  // of the last one comes after all.
  EXPECT_EQ(step_ns("zero1", false, 1), 4 * kGather + 3 * kForward);
  EXPECT_EQ(step_ns("zero1", true, 1), 4 * kGather + kForward);
  EXPECT_EQ(step_ns("zero1", true, 3), 4 * kGather + kForward);
  for (const char* strategy : {"ddp", "fsdp"})
    EXPECT_EQ(step_ns(strategy, true, 2), step_ns(strategy, false, 2)) << strategy;
}

TEST(StepPrediction, ContinuousStepsHaveNoMemoryHistory) {
  TrainingStep step = step_of(config_of(1, 32), engine_for("ddp"));
  step.continuous = step.memory_history = true;
  EXPECT_THAT([&] { predict_on(2, step, KernelCostModel(), microseconds_each(1)); },
              ThrowsMessage<InvalidUsage>(HasSubstr("predict_step: memory_history needs")));
}

TEST(StepPrediction, InterceptorTimesTheKernelsItself) {
  /// Adds a microsecond for each product and nothing for any other call.
  class Products final : public nn::KernelInterceptor {
   public:
    explicit Products(VirtualClock& clock) : clock_(clock) {}
    void call(const nn::KernelInvocation& call, Stream& stream, const std::function<void()>& run) override {
      run();
      if (call.product.count == 0) return;
      ++calls;
      clock_.advance(stream, 1000, call.kernel);
    }
    std::int64_t calls = 0;

   private:
    VirtualClock& clock_;
  };
  const TrainingStep step = step_of(config_of(2, 32), {.strategy = strategy_named("ddp")});
  VirtualClock clock(VirtualClock::Machine::synchronous);
  const auto world = make_world(1, clock, microseconds_each(1));
  Products products(clock);
  const StepProfile predicted = predict_step(step, *world, clock, products);
  EXPECT_GT(products.calls, 0);
  EXPECT_EQ(predicted.steps.at(0).step_ns * 2, products.calls * 1000) << "a first step and the one that counts";
}

TEST(StepPrediction, ErrorNamesUnmeasuredKernel) {
  const TrainingStep step = step_of(config_of(2, 32), engine_for("ddp"));
  EXPECT_THAT([&] { predict_on(2, step, {}, microseconds_each(1)); },
              ThrowsMessage<base::InvalidUsage>(HasSubstr("has no measured cost")));
}

/// State in host memory: the bytes over the link are those of the formula, and they take time.
TEST(StepPrediction, SimulatesCpuOffload) {
  EngineOptions engine = engine_for("fsdp");
  const auto on = [&](double bytes_per_second) {
    engine.cpu_offload = true;
    const TrainingStep step = step_of(config_of(4, 32), engine);
    return predict_step_on(4, step, [=](const nn::KernelInvocation& call) {
      return call.kernel.starts_with("copy_") ? call.size / bytes_per_second : 0.0;
    });
  };
  const StepProfile slow = on(1e6), fast = on(2e6);
  EXPECT_EQ(slow.memory.now_of(MemoryCategory::optimizer), 0U);
  EXPECT_GT(slow.memory.now_of(MemoryCategory::offloaded), 0U);
  const OffloadBytes bytes = offload_formula(engine.strategy, slow.mesh, slow.unit_sizes, 2);
  const auto one_way = static_cast<double>(std::max(bytes.to_device, bytes.to_host));
  EXPECT_GE(static_cast<double>(slow.steps.back().step_ns), one_way / 1e6 * 1e9 * 0.99);
  EXPECT_NEAR(static_cast<double>(slow.steps.back().step_ns) / static_cast<double>(fast.steps.back().step_ns), 2, 0.05);
}

/// Thousands of ranks and a model too large for one rank of this machine: tensors have shapes only.
TEST(StepPrediction, AllocatesNoTensors) {
  const KernelCostModel kernels = no_time(step_of(config_of(2, 32), engine_for("fsdp")));
  const TrainingStep step = step_of(nn::preset("gpt2-xl"), engine_for("fsdp"), 1024);
  const StepProfile record = predict_on(4096, step, kernels, alpha_beta(nanoseconds(20'000), 25e9));
  EXPECT_GT(record.memory.peak_of(MemoryCategory::activation), std::size_t{1} << 30);
  EXPECT_LT(record.memory.peak_of(MemoryCategory::optimizer), std::size_t{1} << 23);
}

}  // namespace
}  // namespace tessera::plan
