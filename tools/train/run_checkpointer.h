// --save and --resume: what train saves of a run, and what a run must share with the run that it resumes.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "tessera/fsdp/checkpoint.h"
#include "tessera/fsdp/gradient_scaler.h"
#include "tools/train/plan.h"

namespace tessera::tools {

void add_saving_options(CLI::App& command, RunOptions& options);

/// With --resume: options of the checkpoint's run that are not given now get the values that they had then. Records
/// what is given or restored in `given`, and in `notes` what a user should know. Call it after parsing, on every rank.
/// Throws InvalidUsage.
void restore_options(CLI::App& command, RunOptions& options);

/// The newest complete checkpoint of --resume; "" if the run starts from the beginning. Throws InvalidUsage.
std::string checkpoint_to_resume(const RunOptions& options);
/// The model of a checkpoint that train wrote. Throws InvalidUsage.
nn::ModelConfig model_in(const std::string& checkpoint);
/// The number of steps done. Throws InvalidUsage if the plan's data would not continue the checkpoint's.
std::int64_t check_resumed(const TrainPlan& plan);

/// A line if the checkpoint of --resume has made all --steps already; else "".
std::string nothing_left_note(const TrainPlan& plan);

/// A line if --steps changes the learning rates of a resumed cosine schedule; else "".
std::string schedule_note(const TrainPlan& plan);

/// A line if the checkpoint to resume contains values that aren't finite, naming the newest finite one; else "".
std::string divergence_note(const TrainPlan& plan);

/// Restores the scaler's state from the checkpoint; if the checkpoint's run had no scaler, it starts anew.
void restore_scaler(const fsdp::Checkpoint& checkpoint, fsdp::GradientScaler& scaler);

/// Writes the checkpoints of a run. A failed save is reported on rank 0, and training continues. Collective.
class RunCheckpointer {
 public:
  /// `scaler`: null if there is none. Throws InvalidUsage if another run saves to the directory.
  RunCheckpointer(const TrainPlan& plan, fsdp::Engine& engine, comm::HostCollectives& control,
                  const fsdp::GradientScaler* scaler);
  void after_step(std::int64_t step);
  /// Waits until the last step's checkpoint is complete.
  void finish();
  /// Why the last save failed; "" if it didn't.
  const std::string& failure() const { return failure_; }

 private:
  template <class Attempt>
  void attempt(Attempt&& attempt);

  const std::int64_t every_;  ///< 0: at the end only
  const std::int64_t last_;
  const fsdp::Attributes attributes_;
  const int rank_;
  const fsdp::GradientScaler* const scaler_;
  fsdp::CheckpointWriter writer_;
  std::string failure_;
};

}  // namespace tessera::tools
