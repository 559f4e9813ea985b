// --save and --resume: what train keeps of a run, and what a run must have in common with the one that it goes on with.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "tessera/fsdp/checkpoint.h"
#include "tessera/fsdp/gradient_scaler.h"
#include "tools/train/options.h"

namespace tessera::tools {

void add_saving_options(CLI::App& command, TrainOptions& options);

/// The newest whole checkpoint of --resume; "" where the run begins at the beginning. Throws InvalidUsage.
std::string checkpoint_to_resume(const TrainOptions& options);
/// The model of a checkpoint that train wrote. Throws InvalidUsage.
nn::ModelConfig model_in(const std::string& checkpoint);
/// The steps that were done. Throws InvalidUsage where the plan's data would not be what comes next.
std::int64_t check_resumed(const TrainPlan& plan);

/// A line where the checkpoint to resume holds values that aren't finite, with the newest that is; else "".
std::string divergence_note(const TrainPlan& plan);

/// The scaler goes on where the checkpoint's run was; from the beginning where that had none.
void restore_scaler(const fsdp::Checkpoint& checkpoint, fsdp::GradientScaler& scaler);

/// The checkpoints of a run. A save that fails is said on rank 0, and training goes on. Collective.
class RunCheckpointer {
 public:
  /// `scaler`: null where there is none. Throws InvalidUsage where another run saves there.
  RunCheckpointer(const TrainPlan& plan, fsdp::Engine& engine, comm::HostCollectives& control,
                  const fsdp::GradientScaler* scaler);
  void after_step(std::int64_t step);
  /// Waits until the last step's is whole.
  void finish();
  /// Why the last save failed; "" where it didn't.
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
