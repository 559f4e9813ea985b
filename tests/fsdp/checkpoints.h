// Trainings that save checkpoints and resume from them.
#pragma once

#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/fsdp/checkpoint.h"
#include "tessera/nn/host_access.h"
#include "tests/fsdp/saved_training.h"
#include "tests/harness/training.h"

namespace tessera::fsdp {

using harness::TrainingSpec;

/// The whole sharded state of an engine: by name, and -1 for values or the number of the optimizer state.
class WholeState {
 public:
  /// Every rank calls it with its engine.
  void add(Engine& engine) {
    engine.state().for_each_shard([&](const ShardRange& own) {
      ASSERT_EQ(own.dtype, base::DType::f32);
      nn::download(engine.model().context(), own.data, static_cast<std::size_t>(own.range.count()) * sizeof(float),
                   [&](const void* data) {
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

inline TrainingSpec spec_for(const std::string& strategy, int ranks, int steps = 2) {
  TrainingSpec spec;
  spec.ranks = ranks;
  spec.steps = steps;
  spec.global_batch = 120;  // divisible by 1, 2, 3, 4, 5 and 8
  spec.seq_len = 4;
  spec.engine = harness::engine_for(strategy);
  return spec;
}

/// Saves after step `at` (from 0) and records the state that was saved.
inline TrainingSpec saving(TrainingSpec spec, const std::string& folder, int at, WholeState* state) {
  spec = saving(std::move(spec), folder, at);
  spec.between_steps = [=, save = spec.between_steps](int step, Engine& engine, comm::HostCollectives& control) {
    save(step, engine, control);
    if (step == at) state->add(engine);
  };
  return spec;
}

}  // namespace tessera::fsdp
