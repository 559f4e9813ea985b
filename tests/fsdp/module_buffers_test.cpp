// Module buffers under every strategy: which rank's values they hold, and what synchronization costs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <mutex>

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
using testing::HasSubstr;

TrainingSpec shared(TrainingSpec spec) {
  spec.engine.buffers = BufferSync::first_rank;
  return spec;
}

constexpr BufferModelOptions kFeedsBack = {.feeds_back = true};

TEST(ModuleBuffers, InitialValuesEqualMaterializedModel) {
  nn::Context context;
  const auto model = buffer_spec("ddp", 1).make_model(context);
  model->materialize(7);
  std::map<std::string, std::vector<float>> expected;
  for (const auto& buffer : model->buffers())
    if (buffer->dtype() == DType::f32)
      expected[buffer->name()] = {buffer->tensor().data<float>(), buffer->tensor().data<float>() + buffer->count()};
  EXPECT_EQ(expected.size(), 6U);
  EXPECT_EQ(expected.at("inner.one"), std::vector<float>{1});
  EXPECT_NE(expected.at("inner.running_mean"), expected.at("last.running_mean")) << "keyed by name";
  for (const char* strategy : kStrategies) {
    TrainingSpec spec = buffer_spec(strategy, 2);
    spec.seed = 7;
    spec.steps = 0;
    spec.before_training = [&](Engine& engine, comm::Communicator&) {
      const BufferBytes bytes = buffers_of(engine);
      EXPECT_EQ(bytes.size(), 8U);
      for (const auto& buffer : engine.state().buffers())
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer->data()) % 64, 0U) << buffer->name();
      for (const auto& [name, values] : expected) EXPECT_EQ(floats(bytes.at(name)), values) << name;
      engine.initialize(8);
      EXPECT_NE(floats(buffers_of(engine).at("inner.running_mean")), expected.at("inner.running_mean"))
          << "the control";
    };
    const TrainingRecord record = train(spec);
    // Each buffer begins at a multiple of 64 bytes.
    const std::uint64_t bytes = 2 * (static_cast<std::uint64_t>(spec.model.width) * 4 + 3 * 64);
    for (const auto& memory_tracker : record.memory_trackers)
      EXPECT_EQ(memory_tracker.now_of(MemoryCategory::other), bytes) << strategy;
  }
}

class BufferSyncModes : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, BufferSyncModes, testing::Values(1, 2, 4));

TEST_P(BufferSyncModes, StrategiesAreBitwiseEqual) {
  for (const bool first_rank : {false, true}) {
    const auto run = [&](const char* strategy) {
      TrainingSpec spec = buffer_spec(strategy, GetParam(), kFeedsBack);
      return train_buffers(first_rank ? shared(spec) : spec);
    };
    const BufferRecord ddp = run("ddp");
    for (const char* strategy : kStrategies) {
      if (std::string(strategy) == "hsdp" && GetParam() == 1) continue;
      const BufferRecord other = run(strategy);
      EXPECT_TRUE(same_bits(other.training, ddp.training)) << strategy;
      EXPECT_EQ(other.buffers, ddp.buffers) << strategy;
    }
    EXPECT_EQ(floats(ddp.buffers[0].at("last.count")), std::vector<float>{4});
  }
}

TEST(ModuleBuffers, FirstRankReplacesBuffersOfOthers) {
  const BufferRecord own = train_buffers(buffer_spec("fsdp", 2));
  const BufferRecord first = train_buffers(shared(buffer_spec("fsdp", 2)));
  EXPECT_EQ(own.buffers[0], first.buffers[0]) << "what it sees is its own";
  EXPECT_NE(own.buffers[1], own.buffers[0]) << "each has its part of the data";
  EXPECT_NE(own.buffers[1], first.buffers[1]);
  EXPECT_TRUE(same_bits(own.training, first.training)) << "which nothing reads";
  // Between two broadcasts a rank updates its buffers from its own data.
  const auto one_step = [](bool first_rank) {
    TrainingSpec spec = buffer_spec("fsdp", 2);
    spec.steps = 1;
    return train_buffers(first_rank ? shared(spec) : spec).buffers;
  };
  EXPECT_EQ(one_step(true), one_step(false)) << "they begin alike";
  // Buffers that feed back change the training: the control of all bitwise comparisons.
  EXPECT_FALSE(same_bits(train(buffer_spec("fsdp", 2, kFeedsBack)), train(buffer_spec("fsdp", 2))));
  EXPECT_FALSE(same_bits(train(shared(buffer_spec("fsdp", 2, kFeedsBack))), train(buffer_spec("fsdp", 2, kFeedsBack))));
}

TEST(ModuleBuffers, CostOneBroadcastPerStep) {
  for (const auto& [strategy, ranks, microbatches] :
       {std::tuple("ddp", 2, 1), std::tuple("fsdp", 4, 1), std::tuple("hsdp", 4, 3), std::tuple("fsdp", 1, 1)}) {
    TrainingSpec spec = buffer_spec(strategy, ranks);
    spec.microbatches = microbatches;
    const std::uint64_t bytes = 2 * (static_cast<std::uint64_t>(spec.model.width) * 4 + 3 * 64);
    const BufferRecord own = train_buffers(spec), first = train_buffers(shared(spec));
    for (std::size_t rank = 0; rank < first.traffic.size(); ++rank) {
      const auto others = static_cast<std::uint64_t>(ranks - 1);
      EXPECT_EQ(first.formula[rank], rank == 0 ? bytes * others : 0U);
      EXPECT_EQ(first.traffic[rank].broadcast.bytes_sent, 4 * first.formula[rank]) << strategy;
      EXPECT_EQ(first.traffic[rank].broadcast.calls, ranks == 1 ? 0U : 4U) << strategy;
      EXPECT_EQ(own.traffic[rank].broadcast.calls, 0U);
      EXPECT_EQ(own.formula[rank], 0U);
      EXPECT_EQ(first.traffic[rank].all_gather, own.traffic[rank].all_gather);
      EXPECT_EQ(first.traffic[rank].reduce_scatter, own.traffic[rank].reduce_scatter);
      EXPECT_EQ(first.traffic[rank].all_reduce, own.traffic[rank].all_reduce);
      EXPECT_EQ(first.traffic[rank].control, own.traffic[rank].control);
    }
  }
}

TEST(ModuleBuffers, EvaluationSendsNothing) {
  TrainingSpec spec = shared(buffer_spec("fsdp", 2));
  spec.before_training = [spec](Engine& engine, comm::Communicator& control) {
    auto& model = dynamic_cast<nn::CausalModel&>(nn_module(engine.model().root()));
    const auto batch = harness::make_batch(model.context(), spec, 0, control.rank());
    const nn::EvaluationScope evaluation(model.context());
    const BufferBytes before = buffers_of(engine);
    model.loss(batch.tokens, batch.targets);
    EXPECT_EQ(buffers_of(engine), before) << "evaluation is no training";
    EXPECT_EQ(engine.stats().traffic().broadcast.calls, 0U);
  };
  const BufferRecord record = train_buffers(spec);
  EXPECT_EQ(record.traffic[0].broadcast.calls, 4U);
  EXPECT_EQ(record.buffers, train_buffers(shared(buffer_spec("fsdp", 2))).buffers);
}

TEST(ModuleBuffers, LazyStreamsAndDevicesAreBitwiseEqual) {
  for (const char* strategy : {"ddp", "fsdp"}) {
    TrainingSpec spec = shared(buffer_spec(strategy, 2, kFeedsBack));
    spec.engine.poison = true;
    const BufferRecord host = train_buffers(spec);
    spec.lazy_streams = true;
    const BufferRecord late = train_buffers(spec);
    EXPECT_TRUE(same_bits(late.training, host.training)) << strategy;
    EXPECT_EQ(late.buffers, host.buffers);
    spec.lazy_streams = false;
    spec.runtime = harness::make_guarded_device({.lazy = true});
    const BufferRecord guarded = train_buffers(spec);
    EXPECT_TRUE(same_bits(guarded.training, host.training)) << strategy;
    EXPECT_EQ(guarded.buffers, host.buffers);
    for (const auto& steps : guarded.training.waits)
      for (std::size_t step = 2; step + 1 < steps.size(); ++step) EXPECT_EQ(steps[step], harness::HostWaits{});
  }
}

/// A broadcast sends the values that the compute stream writes, even if it writes them late.
TEST(ModuleBuffers, BroadcastWaitsForComputeStream) {
  TrainingSpec spec = shared(buffer_spec("fsdp", 3));
  spec.lazy_streams = true;
  spec.steps = 0;
  spec.before_training = [spec](Engine& engine, comm::Communicator& control) {
    nn::Context& context = nn_context(engine.model().runtime());
    for (const auto& buffer : engine.state().buffers())
      if (buffer->name() == "last.count")
        context.kernels<float>("test").fill(context.stream(), static_cast<float>(5 + control.rank()),
                                            static_cast<float*>(buffer->data()), 1);
    const auto batch = harness::make_batch(context, spec, 0, control.rank());
    {
      nn::Tape tape;
      const nn::TapeScope recording(context, &tape);
      dynamic_cast<nn::CausalModel&>(nn_module(engine.model().root())).loss(batch.tokens, batch.targets);
    }
    EXPECT_EQ(floats(buffers_of(engine).at("last.count")), std::vector<float>{5 + 1}) << control.rank();
    engine.abort_step();
  };
  train(spec);
}

TEST(ModuleBuffers, StayF32InHalfPrecisionModel) {
  TrainingSpec spec = shared(buffer_spec("fsdp", 2, kFeedsBack));
  spec.dtype = DType::bf16;
  spec.module_dtypes = {{"type:RunningMean", DType::f32}};
  const BufferRecord fsdp = train_buffers(spec);
  EXPECT_EQ(fsdp.buffers[0].at("inner.running_mean").size(),
            static_cast<std::size_t>(spec.model.width) * sizeof(float));
  spec.engine.strategy = strategy_named("zero1");
  EXPECT_TRUE(same_bits(train(spec), fsdp.training));
}

TEST(ModuleBuffers, RecomputeUpdatesOnce) {
  const auto run = [](bool careless, bool repeated) {
    TrainingSpec spec = buffer_spec("fsdp", 2, {.counts_recomputation = careless});
    spec.make_model = [make = spec.make_model, repeated](nn::Context& context) {
      auto model = make(context);
      if (repeated)
        nn::checkpoint_activations(*model, [](const nn::Module& m) { return m.path() == "inner" || m.is_block(); });
      return model;
    };
    return train_buffers(spec);
  };
  const BufferRecord once = run(false, false), repeated = run(false, true);
  EXPECT_EQ(repeated.buffers, once.buffers);
  EXPECT_TRUE(same_bits(repeated.training, once.training));
  EXPECT_EQ(floats(run(true, true).buffers[0].at("inner.count")), std::vector<float>{8}) << "the control";
  EXPECT_EQ(floats(once.buffers[0].at("inner.count")), std::vector<float>{4});
}

TEST(ModuleBuffers, BroadcastFromSetsBuffersOfSource) {
  TrainingSpec spec = buffer_spec("fsdp", 3);
  spec.steps = 0;
  std::mutex mutex;
  std::map<int, BufferBytes> before, after;
  spec.before_training = [&](Engine& engine, comm::Communicator& control) {
    const int rank = control.rank();
    engine.state().load_buffers(
        [&](const fsdp::ModuleBuffer& buffer, void* out) { std::memset(out, rank + 1, buffer.bytes()); },
        [](const fsdp::ModuleBuffer& buffer) { return buffer.name() != "last.one"; });
    const BufferBytes own = buffers_of(engine);
    EXPECT_EQ(floats(own.at("last.one")), std::vector<float>{1}) << "was not wanted";
    engine.state().broadcast_from(
        1, [](const fsdp::Parameter&, nn::ElementRange range, float* out) { std::fill_n(out, range.count(), 0.5F); });
    const BufferBytes all = buffers_of(engine);
    const std::lock_guard lock(mutex);
    before[rank] = own;
    after[rank] = all;
  };
  const TrainingRecord record = train(spec);
  EXPECT_EQ(record.parameters.at("h.0.ln_1.weight")[0], 0.5F);
  EXPECT_NE(before[0], before[1]);
  for (const auto& [rank, buffers] : after) EXPECT_EQ(buffers, before[1]) << rank;
}

TEST(ModuleBuffers, SyncPeriodRejectsFirstRankMode) {
  TrainingSpec spec = shared(buffer_spec("local_sgd", 2));
  EXPECT_THAT(error_of<base::Unsupported>([&] { train(spec); }), HasSubstr("use BufferSync::own"));
}

}  // namespace
}  // namespace tessera::fsdp
