// Trainings that save checkpoints and resume from them.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/fsdp/checkpoint.h"
#include "tessera/nn/host_access.h"
#include "tests/fsdp/training_specs.h"

namespace tessera::fsdp {

/// Saves after step `at` (from 0) and waits.
inline TrainingSpec saving(TrainingSpec spec, const std::string& directory, int at, bool asynchronous = false) {
  spec.between_steps = [=](int step, Engine& engine, comm::HostCollectives& control) {
    if (step != at) return;
    CheckpointWriter writer(engine, control, {.directory = directory, .asynchronous = asynchronous});
    writer.save({{"colour", "blue"}});
    writer.finish();
  };
  return spec;
}

inline TrainingSpec resuming(TrainingSpec spec, const std::string& directory, int from, RestoreOptions options = {}) {
  spec.first_step = from;
  spec.seed += 1;  // other initial values: all values must come from the checkpoint
  spec.before_training = [=](Engine& engine, comm::Communicator&) {
    Checkpoint checkpoint(directory);
    restore(engine, checkpoint, options);
  };
  return spec;
}

/// The whole sharded state of an engine: by name, and -1 for values or the number of the optimizer state.
class WholeState {
 public:
  /// Every rank calls it with its engine.
  void add(Engine& engine) {
    engine.state().for_each_shard([&](const ShardRange& own) {
      ASSERT_EQ(own.dtype, base::DType::f32);
      engine.model().runtime().download(
          own.data, static_cast<std::size_t>(own.range.count()) * sizeof(float), [&](const void* data) {
            const std::lock_guard lock(mutex_);
            std::vector<float>& all = values[{own.parameter.name(), own.state}];
            all.resize(static_cast<std::size_t>(own.parameter.count()), NAN);
            std::copy_n(static_cast<const float*>(data), own.range.count(), all.begin() + own.range.begin);
            elements += own.range.count();
          });
    });
  }
  std::map<std::pair<std::string, int>, std::vector<float>> values;
  std::int64_t elements = 0;

 private:
  std::mutex mutex_;
};

inline TrainingSpec checkpoint_spec(const std::string& strategy, int ranks, int steps = 2) {
  TrainingSpec spec = base_spec(strategy, ranks, {.layers = 2});
  spec.steps = steps;
  spec.global_batch = 120;  // divisible by 1, 2, 3, 4, 5 and 8
  spec.seq_len = 4;
  return spec;
}

/// Saves after step `at` (from 0) and records the state that was saved.
inline TrainingSpec saving(TrainingSpec spec, const std::string& directory, int at, WholeState* state) {
  spec = saving(std::move(spec), directory, at);
  spec.between_steps = [=, save = spec.between_steps](int step, Engine& engine, comm::HostCollectives& control) {
    save(step, engine, control);
    if (step == at) state->add(engine);
  };
  return spec;
}

}  // namespace tessera::fsdp
