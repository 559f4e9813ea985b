// Order of events, lifetime of buffers, and recovery: the behavior of the engine, not its numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "tessera/fsdp/lease.h"
#include "tests/harness/training.h"

namespace tessera::fsdp {
namespace {

using base::TraceEvent;
using base::TraceEventKind;
using harness::engine_for;
using harness::make_batch;
using harness::train;
using harness::TrainingRecord;
using harness::TrainingSpec;
using testing::ElementsAre;
using testing::HasSubstr;

TrainingSpec spec_for(const std::string& strategy, int ranks = 2) {
  TrainingSpec spec;
  spec.ranks = ranks;
  spec.global_batch = 2 * ranks;
  spec.model.layers = 3;
  spec.engine = engine_for(strategy);
  return spec;
}

/// "forward h.0", ... of the given kinds, in the order of their begin.
std::vector<std::string> order(const std::vector<TraceEvent>& events, std::initializer_list<TraceEventKind> kinds) {
  std::vector<std::string> out;
  for (const TraceEvent& event : events)
    if (std::find(kinds.begin(), kinds.end(), event.kind) != kinds.end())
      out.push_back(std::string(base::name_of(event.kind)) + " " + event.unit);
  return out;
}

TEST(EventOrder, FsdpGathersOneUnitAheadBothWays) {
  const TrainingRecord record = train(spec_for("fsdp"));
  EXPECT_THAT(
      order(record.last_events, {TraceEventKind::unshard_issue, TraceEventKind::forward, TraceEventKind::backward}),
      ElementsAre("unshard_issue root", "unshard_issue h.0", "forward root",  //
                  "unshard_issue h.1", "forward h.0",                         //
                  "unshard_issue h.2", "forward h.1",                         //
                  "forward h.2",                                              // the last unit stays unsharded
                  "backward root", "unshard_issue h.1", "backward h.2",       //
                  "unshard_issue h.0", "backward h.1", "backward h.0"));
}

TEST(EventOrder, WithoutPrefetchEachGatherIsIssuedWhenItIsNeeded) {
  TrainingSpec spec = spec_for("fsdp");
  spec.engine.prefetch = 0;
  const TrainingRecord record = train(spec);
  EXPECT_THAT(
      order(record.last_events, {TraceEventKind::unshard_issue, TraceEventKind::forward, TraceEventKind::backward}),
      ElementsAre("unshard_issue root", "forward root", "unshard_issue h.0", "forward h.0", "unshard_issue h.1",
                  "forward h.1", "unshard_issue h.2", "forward h.2", "backward root", "backward h.2",
                  "unshard_issue h.1", "backward h.1", "unshard_issue h.0", "backward h.0"));
}

TEST(EventOrder, GradientsAreReducedUnitByUnitAndWaitedForOneUnitLater) {
  const TrainingRecord record = train(spec_for("fsdp"));
  EXPECT_THAT(order(record.last_events, {TraceEventKind::reduce_issue, TraceEventKind::reduce_wait,
                                         TraceEventKind::reshard, TraceEventKind::optimizer_step}),
              ElementsAre("reshard h.0", "reshard h.1",                            // forward
                          "reshard h.2", "reduce_issue h.2",                       //
                          "reshard h.1", "reduce_issue h.1", "reduce_wait h.2",    //
                          "reshard h.0", "reduce_issue h.0", "reduce_wait h.1",    //
                          "reshard root", "reduce_issue root", "reduce_wait h.0",  //
                          "reduce_wait root", "optimizer_step root", "optimizer_step h.0", "optimizer_step h.1",
                          "optimizer_step h.2"));
}

TEST(EventOrder, DdpGathersNothingAndZeroGathersAfterTheStep) {
  EXPECT_THAT(order(train(spec_for("ddp")).last_events, {TraceEventKind::unshard_issue, TraceEventKind::reshard}),
              ElementsAre());
  EXPECT_THAT(
      order(train(spec_for("zero1")).last_events, {TraceEventKind::unshard_issue, TraceEventKind::optimizer_step}),
      ElementsAre("optimizer_step root", "unshard_issue root", "optimizer_step h.0", "unshard_issue h.0",
                  "optimizer_step h.1", "unshard_issue h.1", "optimizer_step h.2", "unshard_issue h.2"));
}

TEST(EventOrder, EventsCarryBytesAndTimesThatNest) {
  const TrainingRecord record = train(spec_for("fsdp"));
  for (const TraceEvent& event : record.last_events) {
    EXPECT_LE(event.start_ns, event.end_ns);
    EXPECT_GT(event.bytes, 0u);
    EXPECT_EQ(event.rank, 0);
  }
}

// --- buffers

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

double forward_backward(nn::Context& context, nn::CausalModel& model, const TrainingSpec& spec, int step, int rank) {
  const auto batch = make_batch(context, spec, step, rank);
  nn::Tape tape;
  nn::Tensor loss;
  {
    const nn::TapeScope recording(context, &tape);
    loss = model.loss(batch.tokens, batch.targets);
  }
  tape.backward(loss);
  return loss.item();
}

TEST(ParameterLeases, AReshardedParameterSaysWhoseItIs) {
  const TrainingSpec spec = spec_for("fsdp");
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
  TrainingSpec spec = spec_for("fsdp");
  spec.engine.poison = poison;
  float seen = 0;
  with_engine(spec, [&](nn::Context&, nn::CausalModel& model, Engine& engine, comm::Communicator& world) {
    const float* stale = nullptr;
    engine.state().for_each_parameter([&](const nn::Parameter& parameter, std::span<const float> values) {
      if (parameter.name() == "h.2.ln_1.weight") stale = values.data();  // all ones after initialization
    });
    if (world.rank() == 0) seen = *stale;
    world.barrier().wait();
    (void)model;
  });
  return seen;
}

TEST(ParameterLeases, ReadingAReleasedOneGivesNaNWherePoisoned) {
  EXPECT_TRUE(std::isnan(read_after_release(true)));
  EXPECT_FALSE(std::isnan(read_after_release(false)));  // the control: without poison the stale value looks valid
}

TEST(ParameterLeases, PoisonChangesNoResult) {
  for (const char* name : {"zero2", "fsdp"}) {
    TrainingSpec spec = spec_for(name);
    const TrainingRecord plain = train(spec);
    spec.engine.poison = true;
    EXPECT_EQ(train(spec).losses, plain.losses) << name;
  }
}

TEST(ParameterLeases, AForwardWithoutATapeLeavesEverythingSharded) {
  const TrainingSpec spec = spec_for("fsdp");
  with_engine(spec, [&](nn::Context& context, nn::CausalModel& model, Engine&, comm::Communicator& world) {
    const auto batch = make_batch(context, spec, 0, world.rank());
    EXPECT_GT(model.loss(batch.tokens, batch.targets).item(), 0.0);
    for (const auto& parameter : model.parameters()) EXPECT_FALSE(parameter->tensor().bound()) << parameter->name();
    EXPECT_EQ(context.memory_tracker().snapshot().now_of(base::MemoryCategory::unsharded_parameter), 0u);
  });
}

TEST(ParameterLeases, AllLeasesAreBackAfterAStep) {
  for (const char* name : {"zero2", "fsdp", "shard_grad_op"}) {
    const TrainingSpec spec = spec_for(name);
    for (const auto& memory_tracker : train(spec).memory_trackers) {
      EXPECT_EQ(memory_tracker.now_of(base::MemoryCategory::unsharded_gradient), 0u) << name;
    }
  }
}

TEST(Leases, ReturnTwiceIsRefusedAndReuseWaitsForTheEvent) {
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

TEST(Leases, PoisonComesAfterTheLastTenantAndBeforeTheNext) {
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

// --- state

/// A token outside the vocabulary: the embedding rejects it after the root was gathered and the first block's gather
/// was submitted.
void fail_in_forward(nn::Context& context, nn::CausalModel& model, const TrainingSpec& spec, int step, int rank) {
  const auto batch = make_batch(context, spec, step, rank);
  batch.tokens.data<std::int32_t>()[0] = 1 << 20;
  nn::Tape tape;
  const nn::TapeScope recording(context, &tape);
  EXPECT_THROW(model.loss(batch.tokens, batch.targets), base::InvalidUsage);
}

/// Throws where backward begins, with the units that forward kept still unsharded.
void fail_in_backward(nn::Context& context, nn::CausalModel& model, const TrainingSpec& spec, int step, int rank) {
  struct Thrown {};
  const auto batch = make_batch(context, spec, step, rank);
  nn::Tape tape;
  const nn::TapeScope recording(context, &tape);
  const nn::Tensor loss = model.loss(batch.tokens, batch.targets);
  tape.record("throws", loss, [] { throw Thrown{}; });
  EXPECT_THROW(tape.backward(loss), Thrown);
}

TEST(Recovery, AnExceptionInForwardOrBackwardLeavesTheEngineUsable) {
  for (const char* name : {"ddp", "zero1", "fsdp"}) {
    const TrainingSpec spec = spec_for(name);
    std::vector<double> undisturbed(2), disturbed(2);
    for (const bool disturb : {false, true}) {
      with_engine(spec, [&](nn::Context& context, nn::CausalModel& model, Engine& engine, comm::Communicator& world) {
        for (int step = 0; step < 2; ++step) {
          if (disturb) {
            fail_in_forward(context, model, spec, step, world.rank());
            engine.abort_step();
            fail_in_backward(context, model, spec, step, world.rank());
            engine.abort_step();
          }
          const double loss = forward_backward(context, model, spec, step, world.rank());
          engine.step(1e-2);
          if (world.rank() == 0) (disturb ? disturbed : undisturbed)[static_cast<std::size_t>(step)] = loss;
        }
      });
    }
    EXPECT_EQ(undisturbed, disturbed) << name;
  }
}

TEST(Options, WhatMakesNoSenseIsRefused) {
  const auto refuses = [](const std::function<void(EngineOptions&)>& spoil) {
    TrainingSpec spec = spec_for("fsdp");
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

TEST(Clipping, ScalesToTheNormThatWasAskedFor) {
  TrainingSpec spec = spec_for("fsdp", 3);
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
