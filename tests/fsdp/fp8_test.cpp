// Training with products in 8-bit floating point: strategies are bitwise equal, delayed scaling's state is the same on
// every rank, in checkpoints and after resharding.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tessera/nn/activation_checkpoint.h"
#include "tessera/nn/layers/linear.h"
#include "tests/fsdp/checkpoint_support.h"
#include "tests/fsdp/models.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::fsdp {
namespace {

using harness::same_bits;
using harness::train;
using harness::TrainingRecord;
using nn::Fp8Scaling;
using nn::test::error_of;
using nn::test::TemporaryDirectory;
using testing::HasSubstr;

struct Fp8Options {
  bool checkpoints = false;  ///< backward recomputes the blocks
  bool recomputes = false;   ///< ... or the outputs of norms and activations
  std::string mesh = {};
};

TrainingSpec fp8_spec(const std::string& strategy, int ranks, Fp8Scaling scaling, const Fp8Options& options = {}) {
  TrainingSpec spec = base_spec(
      strategy, ranks,
      {.layers = 2, .mesh = options.mesh, .clip_norm = 0.5, .dtype = DType::bf16, .reduce_dtype = DType::f32});
  spec.global_batch = 12;
  spec.steps = 4;
  if (scaling == Fp8Scaling::delayed) spec.engine.buffers = BufferSync::maximum;
  spec.make_model = [config = spec.model, scaling, options](nn::Context& context) {
    auto model = nn::make_model(context, config);
    model->set_dtype(DType::bf16);
    EXPECT_EQ(nn::use_fp8(*model, scaling), 8) << "four in each block, and not the head";
    if (options.checkpoints) nn::checkpoint_activations(*model);
    context.set_recomputed({.activations = options.recomputes, .norms = options.recomputes});
    return model;
  };
  return spec;
}

TrainingSpec bf16_spec(const std::string& strategy, int ranks) {
  TrainingSpec spec = fp8_spec(strategy, ranks, Fp8Scaling::current);
  spec.make_model = {};
  return spec;
}

class Fp8 : public testing::TestWithParam<Fp8Scaling> {};
INSTANTIATE_TEST_SUITE_P(Scaling, Fp8, testing::Values(Fp8Scaling::current, Fp8Scaling::delayed, Fp8Scaling::none),
                         [](const auto& test) {
                           return std::string(test.param == Fp8Scaling::current   ? "current"
                                              : test.param == Fp8Scaling::delayed ? "delayed"
                                                                                  : "none");
                         });

TEST_P(Fp8, StrategiesAreBitwiseEqual) {
  for (const int ranks : {1, 2, 3, 4}) {
    const TrainingRecord ddp = train(fp8_spec("ddp", ranks, GetParam()));
    for (const char* name : {"zero1", "zero2", "fsdp", "shard_grad_op"})
      EXPECT_TRUE(same_bits(ddp, train(fp8_spec(name, ranks, GetParam())))) << name << " of " << ranks;
    EXPECT_FALSE(same_bits(ddp, train(bf16_spec("ddp", ranks)))) << "the control: fp8 is used";
  }
  const TrainingRecord ddp = train(fp8_spec("ddp", 4, GetParam()));
  for (const char* mesh : {"2x2", "1x4", "4x1"})
    EXPECT_TRUE(same_bits(ddp, train(fp8_spec("hsdp", 4, GetParam(), {.mesh = mesh})))) << mesh;
}

TEST_P(Fp8, RecomputationAndLazyStreamsAreBitwiseEqual) {
  for (const char* name : {"ddp", "fsdp"}) {
    TrainingSpec spec = fp8_spec(name, 2, GetParam());
    spec.engine.poison = true;
    spec.lazy_streams = false;
    const TrainingRecord eager = train(spec);
    spec.lazy_streams = true;
    EXPECT_TRUE(same_bits(eager, train(spec))) << name;
    EXPECT_TRUE(same_bits(eager, train(fp8_spec(name, 2, GetParam(), {.checkpoints = true})))) << name;
    TrainingSpec recomputing = fp8_spec(name, 2, GetParam(), {.recomputes = true});
    recomputing.lazy_streams = false;  // lazy ones keep the memory of work that has not run
    const TrainingRecord less = train(recomputing);
    EXPECT_TRUE(same_bits(eager, less)) << name;
    EXPECT_LT(less.memory_trackers[0].peak_of(base::MemoryCategory::activation),
              eager.memory_trackers[0].peak_of(base::MemoryCategory::activation))
        << name;
  }
}

TEST_P(Fp8, AccumulationIsBitwiseEqual) {
  const auto run = [&](const char* strategy) {
    TrainingSpec spec = fp8_spec(strategy, 2, GetParam());
    spec.microbatches = 3;
    return train(spec);
  };
  EXPECT_TRUE(same_bits(run("ddp"), run("fsdp")));
}

TEST(Fp8Training, ScalingsDiffer) {
  const TrainingRecord current = train(fp8_spec("fsdp", 2, Fp8Scaling::current));
  EXPECT_FALSE(same_bits(current, train(fp8_spec("fsdp", 2, Fp8Scaling::delayed))));
  EXPECT_FALSE(same_bits(current, train(fp8_spec("fsdp", 2, Fp8Scaling::none))));
}

/// After a step's first forward under a tape the histories are the largest of all ranks'; the newest are a rank's own.
TEST(Fp8Training, HistoriesAreSynchronizedOncePerStep) {
  const auto run = [](BufferSync sync) {
    TrainingSpec spec = fp8_spec("fsdp", 3, Fp8Scaling::delayed);
    spec.engine.buffers = sync;
    return train_buffers(spec);
  };
  const BufferRecord shared = run(BufferSync::maximum), own = run(BufferSync::own);
  const auto history = [](const BufferBytes& buffers, std::size_t from) {
    std::vector<float> all = floats(buffers.at("h.1.mlp.c_fc.fp8_amax")), some;
    for (std::size_t place = 0; place < 3; ++place)
      some.insert(some.end(), all.begin() + static_cast<std::ptrdiff_t>(place * (1 + nn::kFp8History) + from),
                  all.begin() + static_cast<std::ptrdiff_t>((place + 1) * (1 + nn::kFp8History)));
    return some;
  };
  for (const int rank : {1, 2}) {
    const auto r = static_cast<std::size_t>(rank);
    EXPECT_EQ(history(shared.buffers[r], 2), history(shared.buffers[0], 2));
    EXPECT_NE(history(shared.buffers[r], 0), history(shared.buffers[0], 0));
    EXPECT_NE(history(own.buffers[r], 2), history(own.buffers[0], 2)) << "the control";
  }
  for (std::size_t rank = 0; rank < 3; ++rank) {
    EXPECT_GT(shared.formula[rank], 0U);
    EXPECT_EQ(shared.traffic[rank].broadcast.bytes_sent, 4 * shared.formula[rank]);
    EXPECT_EQ(shared.traffic[rank].broadcast.calls, 4U);
    EXPECT_EQ(own.traffic[rank].broadcast.calls, 0U);
  }
}

/// Saving, with or without a resumption, changes nothing.
TEST(Fp8Training, ResumedRunEqualsUninterrupted) {
  for (const Fp8Scaling scaling : {Fp8Scaling::current, Fp8Scaling::delayed}) {
    const TemporaryDirectory directory;
    const TrainingSpec spec = fp8_spec("fsdp", 2, scaling);
    const TrainingRecord whole = train(spec);
    EXPECT_TRUE(same_bits(whole, train(saving(spec, directory.path(), 1))));
    const TrainingRecord resumed = train(resuming(spec, directory.path(), 2));
    EXPECT_TRUE(resumed.parameters == whole.parameters);
    TrainingSpec forgetful = resuming(spec, directory.path(), 2);
    forgetful.before_training = [read = forgetful.before_training](Engine& engine, comm::Communicator& control) {
      read(engine, control);
      engine.state().load_buffers([](const fsdp::ModuleBuffer& buffer, void* out) {
        std::fill_n(static_cast<float*>(out), buffer.count(), 0.0F);
      });
    };
    EXPECT_EQ(train(forgetful).parameters == whole.parameters, scaling == Fp8Scaling::current) << "the control";
  }
}

/// The histories that another world and strategy saved are those that every rank begins with.
TEST(Fp8Training, HistoriesSurviveResharding) {
  const TemporaryDirectory directory;
  BufferBytes saved;
  TrainingSpec before = saving(fp8_spec("zero1", 3, Fp8Scaling::delayed), directory.path(), 3);
  before.between_steps = [&, save = before.between_steps](int step, Engine& engine, comm::HostCollectives& control) {
    save(step, engine, control);
    if (step == 3 && control.rank() == 0) saved = buffers_of(engine);
  };
  train(before);
  ASSERT_EQ(saved.size(), 8U);
  TrainingSpec after = resuming(fp8_spec("fsdp", 2, Fp8Scaling::delayed), directory.path(), 4);
  after.steps = 6;
  after.before_training = [&, read = after.before_training](Engine& engine, comm::Communicator& control) {
    EXPECT_NE(buffers_of(engine), saved);
    read(engine, control);
    EXPECT_EQ(buffers_of(engine), saved);
  };
  for (const double loss : train(after).losses) EXPECT_TRUE(std::isfinite(loss));
}

/// A run can begin to use delayed scaling, or cease to.
TEST(Fp8Training, CheckpointsWithoutHistoriesRestoreIfTheyAreOptional) {
  const TemporaryDirectory current, delayed;
  train(saving(fp8_spec("fsdp", 2, Fp8Scaling::current), current.path(), 1));
  train(saving(fp8_spec("fsdp", 2, Fp8Scaling::delayed), delayed.path(), 1));
  for (const auto& [directory, scaling] :
       {std::pair(current.path(), Fp8Scaling::delayed), std::pair(delayed.path(), Fp8Scaling::current)}) {
    const TrainingSpec spec = fp8_spec("fsdp", 2, scaling);
    EXPECT_THAT(error_of<base::InvalidUsage>([&] { train(resuming(spec, directory, 2)); }), HasSubstr("fp8_amax"));
    const TrainingRecord record = train(resuming(spec, directory, 2, {.optional_buffers = nn::is_fp8_state}));
    EXPECT_EQ(record.losses.size(), 2U);
  }
}

TEST(Fp8Training, SynchronizationNeedsF32BuffersAndNoSyncPeriod) {
  TrainingSpec counts = buffer_spec("fsdp", 2);
  counts.engine.buffers = BufferSync::maximum;
  EXPECT_THAT(error_of<base::InvalidUsage>([&] { train(counts); }), HasSubstr("needs f32"));
  EXPECT_THAT(error_of<base::Unsupported>([&] { train(fp8_spec("local_sgd", 2, Fp8Scaling::delayed)); }),
              HasSubstr("sync period"));
}

}  // namespace
}  // namespace tessera::fsdp
