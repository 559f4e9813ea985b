// Checkpoints: the saved state is restored on any world size, and nothing else is accepted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>

#include "tests/fsdp/checkpoint_support.h"
#include "tests/harness/guarded_device.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::fsdp {
namespace {

using harness::train;
using harness::TrainingRecord;
using nn::test::error_of;
using nn::test::TemporaryDirectory;
using testing::ElementsAre;
using testing::HasSubstr;
namespace fs = std::filesystem;

/// Acceptance item 12, over shared memory and over sockets.
class CheckpointResharding : public testing::TestWithParam<std::string> {
 protected:
  static TrainingSpec over(TrainingSpec spec) {
    spec.backend = GetParam();
    return spec;
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, CheckpointResharding, testing::Values("shm", "tcp"),
                         [](const auto& test) { return test.param; });

TEST_P(CheckpointResharding, P12_RestoresOnAnyWorldAndStrategy) {
  const std::vector<std::string> strategies = {"ddp", "zero1", "zero2", "fsdp", "shard_grad_op", "hsdp"};
  const std::vector<std::string> wraps = {"block", "none", "size:20000"};
  std::size_t turn = 0;
  for (const int from : {1, 2, 3, 4, 5, 8}) {
    const TemporaryDirectory directory;
    WholeState saved;
    const auto pick = [&](int ranks) {
      const std::string& name = strategies[turn++ % strategies.size()];
      return name == "hsdp" && ranks % 2 != 0 ? std::string("fsdp") : name;
    };
    TrainingSpec writes = over(checkpoint_spec(pick(from), from));
    writes.engine.wrap = wraps[turn % wraps.size()];
    train(saving(writes, directory.path(), 1, &saved));
    ASSERT_EQ(saved.values.size(), 3u * 28);  // parameters, and two optimizer states of each
    EXPECT_EQ(saved.elements, 3 * 120576);    // each element once
    for (const int to : {1, 2, 3, 4, 5, 8}) {
      TrainingSpec reads = over(checkpoint_spec(pick(to), to, 0));
      reads.engine.wrap = wraps[turn % wraps.size()];
      WholeState found;
      reads = resuming(reads, directory.path(), 0);
      const auto restoring = reads.before_training;
      reads.before_training = [&](Engine& engine, comm::Communicator& control) {
        restoring(engine, control);
        EXPECT_EQ(engine.steps(), 2u);
        found.add(engine);
      };
      train(reads);
      EXPECT_TRUE(found.values == saved.values) << from << " to " << to << " as " << reads.engine.strategy.name;
    }
  }
}

TEST_P(CheckpointResharding, P12_ResumedRunEqualsUninterrupted) {
  for (const char* name : {"ddp", "zero1", "zero2", "fsdp", "hsdp", "shard_grad_op"})
    for (const base::DType dtype : {base::DType::f32, base::DType::bf16}) {
      const TemporaryDirectory directory;
      TrainingSpec spec = over(checkpoint_spec(name, 4, 4));
      spec.dtype = dtype;
      const TrainingRecord whole = train(saving(spec, directory.path(), 1));
      const TrainingRecord resumed = train(resuming(spec, directory.path(), 2));
      EXPECT_EQ(resumed.parameters, whole.parameters) << name;
      EXPECT_THAT(resumed.losses, ElementsAre(whole.losses[2], whole.losses[3])) << name;
      const TrainingRecord control = train(resuming(spec, directory.path(), 2, {.optimizer = false}));
      EXPECT_NE(control.parameters, whole.parameters) << name << ": the control without the optimizer's state";
    }
}

/// On a device whose streams run late, with shards on the device or offloaded to the CPU; and from there to a CPU run.
TEST(Checkpoints, MoveBetweenDeviceOffloadAndCpu) {
  for (const bool offload : {false, true})
    for (const base::DType dtype : {base::DType::f32, base::DType::bf16}) {
      const TemporaryDirectory directory;
      TrainingSpec spec = checkpoint_spec("fsdp", 2, 4);
      spec.dtype = dtype;
      const TrainingRecord on_host = train(spec);
      spec.runtime = harness::make_guarded_device({.lazy = true});
      spec.engine.cpu_offload = offload;
      spec.engine.poison = true;
      const TrainingRecord whole = train(saving(spec, directory.path(), 1));
      EXPECT_EQ(whole.parameters, on_host.parameters);
      EXPECT_EQ(train(resuming(spec, directory.path(), 2)).parameters, whole.parameters) << offload;
      TrainingSpec elsewhere = checkpoint_spec("zero1", 2, 4);
      elsewhere.dtype = dtype;
      EXPECT_EQ(train(resuming(elsewhere, directory.path(), 2)).parameters, whole.parameters) << offload;
    }
}

TEST(Checkpoints, AsynchronousSaveKeepsStateOfItsStep) {
  const TemporaryDirectory directory;
  TrainingSpec spec = checkpoint_spec("fsdp", 2, 6);
  WholeState at_save, at_end;
  std::map<int, std::unique_ptr<CheckpointWriter>> writers;
  std::mutex mutex;
  spec.between_steps = [&](int step, Engine& engine, comm::HostCollectives& control) {
    CheckpointWriter& writer = *[&] {
      const std::lock_guard lock(mutex);
      auto& mine = writers[control.rank()];
      if (mine == nullptr)
        mine = std::make_unique<CheckpointWriter>(engine, control,
                                                  CheckpointOptions{.directory = directory.path(), .buffer_bytes = 1});
      return mine.get();
    }();
    if (step == 1) {
      writer.save({});
      at_save.add(engine);
    } else if (step < 5) {
      writer.poll();
    } else {
      writer.finish();
      EXPECT_FALSE(writer.saving());
      at_end.add(engine);
      const std::lock_guard lock(mutex);
      writers.erase(control.rank());
    }
  };
  train(spec);
  EXPECT_NE(at_end.values, at_save.values);
  Checkpoint checkpoint(directory.path());
  EXPECT_EQ(checkpoint.step(), 2u);
  for (const auto& [key, values] : at_save.values) {
    std::vector<float> found(values.size());
    checkpoint.read(key.first, key.second, {0, static_cast<std::int64_t>(found.size())}, found.data());
    EXPECT_EQ(found, values) << key.first;
  }
}

/// A save waits for work of the step that is still in flight. Under fsdp nothing else does: no gather follows the
/// update.
TEST(Checkpoints, SaveWaitsForStepInFlight) {
  for (const char* strategy : {"zero2", "fsdp"}) {
    std::vector<std::map<std::string, std::vector<float>>> saved;
    for (const bool lazy : {false, true}) {
      const TemporaryDirectory directory;
      TrainingSpec spec = checkpoint_spec(strategy, 2, 4);
      spec.lazy_streams = lazy;
      train(saving(spec, directory.path(), 2));
      Checkpoint checkpoint(directory.path());
      std::map<std::string, std::vector<float>>& values = saved.emplace_back();
      for (const CheckpointTensor& tensor : checkpoint.tensors())
        for (int what = Checkpoint::kValue; what < tensor.states; ++what) {
          std::vector<float>& all = values[tensor.name + std::to_string(what)];
          all.resize(static_cast<std::size_t>(nn::count_of(tensor.shape)));
          checkpoint.read(tensor.name, what, {0, nn::count_of(tensor.shape)}, all.data());
        }
    }
    EXPECT_FALSE(saved[0].empty());
    EXPECT_EQ(saved[0], saved[1]) << strategy;
  }
}

TEST(Checkpoints, RankReadsLittleMoreThanItsShard) {
  const TemporaryDirectory directory;
  TrainingSpec writes = checkpoint_spec("fsdp", 3, 1);
  writes.model = nn::preset("gpt-mini");
  writes.global_batch = 12;
  train(saving(writes, directory.path(), 0));
  TrainingSpec reads = writes;
  reads.ranks = 2;
  reads.steps = 0;
  reads.before_training = [&](Engine& engine, comm::Communicator&) {
    std::uint64_t needed = 0, ranges = 0;
    engine.state().for_each_shard([&](const ShardRange& own) {
      needed += static_cast<std::uint64_t>(own.range.count()) * sizeof(float);
      ++ranges;
    });
    Checkpoint checkpoint(directory.path());
    restore(engine, checkpoint);
    ranges += 3 * 2 * engine.stats().units().size();  // each third of a unit begins another range
    EXPECT_GE(checkpoint.bytes_read(), needed);
    EXPECT_LE(checkpoint.bytes_read(), needed + needed / 20 + ranges * 2 * 64 * 1024);
    EXPECT_LE(checkpoint.bytes_read(), needed + needed / 4) << "the bound by ranges says little here: " << needed;
  };
  train(reads);
}

TEST(Checkpoints, KeepsLastKAndReplacesSameStep) {
  const TemporaryDirectory directory;
  directory.write("latest.tmp-1-0", "left by a run that was killed");
  TrainingSpec spec = checkpoint_spec("zero2", 2, 4);
  spec.between_steps = [&](int step, Engine& engine, comm::HostCollectives& control) {
    CheckpointWriter writer(engine, control, {.directory = directory.path(), .keep_last = 2});
    writer.save({{"time", "first"}});
    writer.save({{"time", step == 3 ? "second" : "first"}});
    writer.finish();
  };
  train(spec);
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory.path())) names.push_back(entry.path().filename());
  EXPECT_THAT(names, testing::UnorderedElementsAre(".lock", "latest", "step-00000003", "step-00000004"));
  Checkpoint checkpoint(directory.path());
  EXPECT_EQ(checkpoint.attributes().at("time"), "second");
  std::ifstream latest(directory.path("latest"));
  std::string name;
  latest >> name;
  EXPECT_EQ(name, "step-00000004");
}

TEST(Checkpoints, KeepsLastFiniteCheckpoint) {
  const TemporaryDirectory directory;
  TrainingSpec spec = checkpoint_spec("fsdp", 2, 5);
  spec.between_steps = [&](int step, Engine& engine, comm::HostCollectives& control) {
    if (step == 3 && control.rank() == 1)  // one value of one rank
      engine.state().for_each_shard([&](const ShardRange& own) {
        if (own.state == 0) static_cast<float*>(const_cast<void*>(own.data))[own.range.count() - 1] = INFINITY;
      });
    CheckpointWriter writer(engine, control, {.directory = directory.path(), .keep_last = 1});
    writer.save({});
    writer.finish();
    if (step == 2) {  // the control: while all checkpoints are finite only the last one stays
      EXPECT_EQ(latest_checkpoint(directory.path()), directory.path("step-00000003"));
      EXPECT_FALSE(fs::exists(directory.path("step-00000002")));
    }
  };
  train(spec);
  EXPECT_EQ(latest_finite_checkpoint(directory.path()), directory.path("step-00000003"));
  EXPECT_EQ(latest_checkpoint(directory.path()), directory.path("step-00000005"));
  EXPECT_FALSE(fs::exists(directory.path("step-00000004")));
  EXPECT_TRUE(Checkpoint(directory.path("step-00000003")).finite());
  EXPECT_FALSE(Checkpoint(directory.path()).finite());
}

TEST(Checkpoints, ReadsWhileOlderCheckpointsAreRemoved) {
  const TemporaryDirectory directory;
  std::atomic<bool> begun = false, over = false;
  std::atomic<int> opened = 0;
  std::thread reader([&] {
    while (!begun) std::this_thread::yield();
    while (!over) {
      Checkpoint checkpoint(directory.path());
      EXPECT_THAT(checkpoint.verify(), testing::IsEmpty());
      ++opened;
    }
  });
  TrainingSpec spec = checkpoint_spec("fsdp", 2, 60);
  spec.between_steps = [&](int, Engine& engine, comm::HostCollectives& control) {
    CheckpointWriter writer(engine, control, {.directory = directory.path(), .keep_last = 1, .asynchronous = false});
    writer.save({});
    begun = true;
  };
  train(spec);
  over = true;
  reader.join();
  EXPECT_GT(opened, 10);
  // The negative control: a damaged step is not mistaken for a removed one.
  std::ofstream(directory.path("step-00000060/rank-00000.json"), std::ios::app) << " ";
  EXPECT_THROW(Checkpoint{directory.path()}, InvalidUsage);
}

TEST(Checkpoints, DirectoryBelongsToOneRun) {
  const TemporaryDirectory directory;
  TrainingSpec spec = checkpoint_spec("fsdp", 2, 1);
  spec.between_steps = [&](int, Engine& engine, comm::HostCollectives& control) {
    const int rank = control.rank();
    const CheckpointOptions options{.directory = directory.path()};
    auto first = std::make_unique<CheckpointWriter>(engine, control, options);
    first->claim();
    first->claim();  // a second claim has no effect
    first->save({});
    CheckpointWriter second(engine, control, options),
        elsewhere(engine, control, {.directory = directory.path("other")});
    const std::string owner = "another run (process " + std::to_string(::getpid()) + " on ";
    EXPECT_THAT(error_of<base::InvalidUsage>([&] { second.claim(); }), HasSubstr(owner)) << rank;
    EXPECT_THAT(error_of<base::SystemError>([&] { second.save({}); }), HasSubstr(owner)) << rank;
    elsewhere.claim();
    first->finish();  // its asynchronous save is complete
    EXPECT_EQ(Checkpoint(directory.path()).step(), 1u);
    first.reset();
    control.gather_all(std::vector<int>{rank});  // rank 0 has released the directory
    second.claim();
    second.save({{"by", "second"}});
    second.finish();
    EXPECT_EQ(Checkpoint(directory.path()).attributes().at("by"), "second");
  };
  train(spec);
}

TEST(Checkpoints, FailedSaveThrowsOnAllRanksAndTrainingContinues) {
  const TemporaryDirectory directory;
  fs::create_directory(directory.path("step-00000001.partial"));
  TrainingSpec spec = checkpoint_spec("fsdp", 3, 2);
  std::map<int, std::string> errors;
  std::mutex mutex;
  spec.between_steps = [&](int step, Engine& engine, comm::HostCollectives& control) {
    if (step != 0) return;
    // A file at the path of the directory.
    CheckpointWriter writer(engine, control, {.directory = directory.write("file", "x") + "/below"});
    const std::string error = error_of<base::SystemError>([&] { writer.save({}); });
    EXPECT_FALSE(writer.saving());
    const std::lock_guard lock(mutex);
    errors[control.rank()] = error;
  };
  EXPECT_EQ(train(spec).losses, train(checkpoint_spec("fsdp", 3, 2)).losses);
  ASSERT_EQ(errors.size(), 3u);
  for (const auto& [rank, error] : errors)
    EXPECT_THAT(error, HasSubstr("checkpoint of step 1 is not written: rank 0: ")) << rank;
}

}  // namespace
}  // namespace tessera::fsdp
