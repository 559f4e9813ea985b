// Trainings that save checkpoints and resume from them.
#pragma once

#include <string>

#include "tessera/fsdp/checkpoint.h"
#include "tests/harness/training.h"

namespace tessera::fsdp {

/// Saves after step `at` (from 0) and waits.
inline harness::TrainingSpec saving(harness::TrainingSpec spec, const std::string& folder, int at,
                                    bool asynchronous = false) {
  spec.between_steps = [=](int step, Engine& engine, comm::HostCollectives& control) {
    if (step != at) return;
    CheckpointWriter writer(engine, control, {.folder = folder, .asynchronous = asynchronous});
    writer.save({{"colour", "blue"}});
    writer.finish();
  };
  return spec;
}

inline harness::TrainingSpec resuming(harness::TrainingSpec spec, const std::string& folder, int from,
                                      RestoreOptions options = {}) {
  spec.first_step = from;
  spec.seed += 1;  // other initial values: all values must come from the checkpoint
  spec.before_training = [=](Engine& engine, comm::Communicator&) {
    Checkpoint checkpoint(folder);
    restore(engine, checkpoint, options);
  };
  return spec;
}

}  // namespace tessera::fsdp
