// Lifetime of buffers, options and clipping: the behavior of the engine, not its numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "tessera/fsdp/lease.h"
#include "tests/fsdp/training_specs.h"

namespace tessera::fsdp {
namespace {

using harness::make_batch;
using harness::train;
using harness::TrainingRecord;
using testing::ElementsAre;
using testing::HasSubstr;

/// One rank's engine in a world of threads, for tests that inspect a step.
void with_engine(const TrainingSpec& spec,
                 const std::function<void(nn::Context&, nn::CausalModel&, Engine&, comm::Communicator&)>& body) {
  comm::InitOptions config;
  config.backend = "shm";
  config.timeout = std::chrono::seconds(60);
  comm::run_threads(spec.ranks, config, [&](comm::Communicator& world) {
    nn::Context context({.threads = 1, .memory_tracker = world.memory_tracker(), .memory = {}, .make_stream = {}});
    const auto model = nn::make_model(context, spec.model);
    Engine engine(*model, world, spec.engine);
    engine.initialize(spec.seed);
    body(context, *model, engine, world);
  });
}

nn::Tensor parameter_named(nn::Module& model, const std::string& name) {
  for (const auto& parameter : model.parameters())
    if (parameter->name() == name) return parameter->tensor();
  throw std::runtime_error("no parameter " + name);
}

TEST(ParameterLeases, ErrorNamesUnitOfReshardedParameter) {
  const TrainingSpec spec = base_spec("fsdp");
  with_engine(spec, [&](nn::Context&, nn::CausalModel& model, Engine&, comm::Communicator&) {
    const nn::Tensor tensor = parameter_named(model, "h.1.mlp.c_fc.weight");
    try {
      tensor.data<float>();
      FAIL();
    } catch (const base::InvalidUsage& error) {
      EXPECT_THAT(error.what(), HasSubstr("h.1.mlp.c_fc.weight"));
      EXPECT_THAT(error.what(), HasSubstr("unit h.1 is resharded"));
    }
  });
}

/// Keeps a pointer into a unit's buffer after its reshard, as a bug would, and reads through it.
float read_after_release(bool poison) {
  TrainingSpec spec = base_spec("fsdp");
  spec.engine.poison = poison;
  float seen = 0;
  with_engine(spec, [&](nn::Context&, nn::CausalModel& model, Engine& engine, comm::Communicator& world) {
    const float* stale = nullptr;
    engine.state().for_each_parameter([&](const fsdp::Parameter& parameter, std::span<const float> values) {
      if (parameter.name() == "h.2.ln_1.weight") stale = values.data();  // all ones after initialization
    });
    if (world.rank() == 0) seen = *stale;
    world.barrier().wait();
    (void)model;
  });
  return seen;
}

TEST(ParameterLeases, PoisonedReleasedMemoryReadsAsNaN) {
  EXPECT_TRUE(std::isnan(read_after_release(true)));
  EXPECT_FALSE(std::isnan(read_after_release(false)));  // the control: without poison the stale value looks valid
}

TEST(ParameterLeases, PoisonIsBitwiseEqual) {
  for (const char* name : {"zero2", "fsdp"}) {
    TrainingSpec spec = base_spec(name);
    const TrainingRecord plain = train(spec);
    spec.engine.poison = true;
    EXPECT_EQ(train(spec).losses, plain.losses) << name;
  }
}

TEST(ParameterLeases, ForwardWithoutTapeReshardsAllUnits) {
  const TrainingSpec spec = base_spec("fsdp");
  with_engine(spec, [&](nn::Context& context, nn::CausalModel& model, Engine&, comm::Communicator& world) {
    const auto batch = make_batch(context, spec, 0, world.rank());
    EXPECT_GT(model.loss(batch.tokens, batch.targets).item(), 0.0);
    for (const auto& parameter : model.parameters()) EXPECT_FALSE(parameter->tensor().bound()) << parameter->name();
    EXPECT_EQ(context.memory_tracker().snapshot().now_of(base::MemoryCategory::unsharded_parameter), 0u);
  });
}

TEST(ParameterLeases, StepReleasesAllLeases) {
  for (const char* name : {"zero2", "fsdp", "shard_grad_op"}) {
    const TrainingSpec spec = base_spec(name);
    for (const auto& memory_tracker : train(spec).memory_trackers) {
      EXPECT_EQ(memory_tracker.now_of(base::MemoryCategory::unsharded_gradient), 0u) << name;
    }
  }
}

TEST(Leases, RejectDoubleReleaseAndReuseAfterEvent) {
  base::MemoryTracker memory_tracker;
  nn::Context context;
  LeasePool pool(memory_tracker, base::MemoryCategory::unsharded_parameter,
                 [&](std::size_t bytes) { return context.memory().allocate(bytes, base::MemoryCategory::other); }, {});
  const auto stream = base::make_lazy_stream();
  const auto user = base::make_lazy_stream();
  Lease first = pool.acquire(1024, "a", *user);
  EXPECT_THAT(pool.owners(), ElementsAre("a"));
  EXPECT_EQ(memory_tracker.snapshot().now_of(base::MemoryCategory::unsharded_parameter), 1024u);
  bool tenant_done = false;
  stream->run([&] { tenant_done = true; });
  first.release(stream->record());
  EXPECT_THROW(first.release(base::Event()), base::InvalidUsage);
  Lease second = pool.acquire(512, "b", *user);
  EXPECT_FALSE(tenant_done);
  user->synchronize();  // the next lease's stream waits for the last one's work
  EXPECT_TRUE(tenant_done);
  second.release(base::Event());
  EXPECT_EQ(memory_tracker.snapshot().now_of(base::MemoryCategory::unsharded_parameter), 0u);
}

TEST(Leases, PoisonBetweenTwoUsers) {
  base::MemoryTracker memory_tracker;
  nn::Context context;
  const auto filler = base::make_lazy_stream();
  LeasePool pool(
      memory_tracker, base::MemoryCategory::unsharded_parameter,
      [&](std::size_t bytes) { return context.memory().allocate(bytes, base::MemoryCategory::other); },
      [&](const base::Event& released, void* data, std::size_t bytes) {
        filler->wait(released);
        filler->run([=] { std::memset(data, 0xFF, bytes); });
        return filler->record();
      });
  const auto user = base::make_lazy_stream();
  Lease first = pool.acquire(sizeof(float), "a", *user);
  auto* value = static_cast<float*>(first.data());
  float last_seen = 0, next_seen = 0;
  user->run([=] { *value = 1; });
  user->run([&last_seen, value] { last_seen = *value; });
  first.release(user->record());
  Lease second = pool.acquire(sizeof(float), "b", *user);
  ASSERT_EQ(second.data(), value);
  user->run([&next_seen, value] { next_seen = *value; });
  user->synchronize();
  EXPECT_EQ(last_seen, 1.0F);
  EXPECT_TRUE(std::isnan(next_seen));
  second.release(base::Event());
}

// --- options

TEST(Options, RejectInvalidValues) {
  const auto refuses = [](const std::function<void(EngineOptions&)>& spoil) {
    TrainingSpec spec = base_spec("fsdp");
    spoil(spec.engine);
    EXPECT_THROW(train(spec), base::InvalidUsage);
  };
  refuses([](EngineOptions& o) { o.prefetch = -1; });
  refuses([](EngineOptions& o) { o.limit_all_gathers = -1; });
  refuses([](EngineOptions& o) { o.clip_norm = -1; });
  refuses([](EngineOptions& o) { o.wrap = "no_such_module"; });
  refuses([](EngineOptions& o) { o.mesh = parse_mesh("2x2"); });
  refuses([](EngineOptions& o) { o.strategy.all_gather = "no_such_plugin"; });
  refuses([](EngineOptions& o) { o.optimizer.beta1 = 1.5; });
}

TEST(Clipping, ScalesToConfiguredNorm) {
  TrainingSpec spec = base_spec("fsdp", 3);
  spec.engine.optimizer.kind = nn::OptimizerConfig::Kind::sgd;
  spec.steps = 1;
  spec.engine.measure_norm = true;
  std::map<std::string, std::vector<float>> before;
  spec.lr = 0;
  const TrainingRecord start = train(spec);
  spec.lr = 1;
  const TrainingRecord plain = train(spec);
  spec.engine.clip_norm = plain.norms[0] / 4;
  const TrainingRecord clipped = train(spec);
  EXPECT_EQ(plain.norms, clipped.norms);  // the norm before clipping
  double moved_plain = 0, moved_clipped = 0;
  for (const auto& [name, values] : start.parameters)
    for (std::size_t i = 0; i < values.size(); ++i) {
      moved_plain += std::pow(plain.parameters.at(name)[i] - values[i], 2);
      moved_clipped += std::pow(clipped.parameters.at(name)[i] - values[i], 2);
    }
  EXPECT_NEAR(std::sqrt(moved_plain), plain.norms[0], 1e-2 * plain.norms[0]);
  EXPECT_NEAR(std::sqrt(moved_clipped), plain.norms[0] / 4, 1e-2 * plain.norms[0]);
}

}  // namespace
}  // namespace tessera::fsdp
