// The plan of a training, made from its options.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/bootstrap.h"
#include "tessera/fsdp/engine.h"
#include "tessera/fsdp/training_task.h"
#include "tessera/nn/data.h"
#include "tessera/nn/lora.h"
#include "tessera/nn/models/config.h"
#include "tools/launch/launcher.h"
#include "tools/launch/ranks.h"
#include "tools/train/options.h"

namespace tessera::tools {

/// Whether a training replays its steps as device graphs.
enum class GraphUse : std::uint8_t {
  never,
  if_possible,  ///< without --graphs: a step that turns out not to be capturable runs as it would without graphs
  required      ///< --graphs: it ends the training
};

/// The options with names, files and numbers resolved. All errors are detected here, before a rank is started.
struct TrainPlan {
  TrainOptions options;
  int ranks = 1;
  int ranks_per_host = 1;                ///< for the default mesh
  std::optional<comm::SlowLinks> links;  ///< with --link
  bool fits_links = false;               ///< `links` only record, and the real ones are measured after the training
  int threads = 1;                       ///< compute threads per rank
  nn::Products products = nn::Products::library;
  std::optional<fsdp::ExportedTask> task;  ///< of a plug-in file, which --model names; nothing: `model`
  bool can_be_simulated = true;            ///< false: the task's model needs values
  nn::ModelConfig model;                   ///< of the tool
  std::optional<nn::LoraOptions> lora;     ///< nothing: all parameters are trained
  bool quantized = false;                  ///< the weights of linear layers are in NF4
  std::int64_t seq_len = 0;
  std::shared_ptr<const nn::TokenDataset> data;  ///< null if there is nothing to train
  std::shared_ptr<const nn::TokenDataset> eval;  ///< null without --eval
  std::string checkpoint;                        ///< the directory that the run resumes from; "": from the beginning
  std::int64_t first_step = 0;                   ///< steps done before
  nn::LrSchedule schedule;
  fsdp::Precision precision;
  GraphUse graphs = GraphUse::never;
  std::optional<nn::Fp8Scaling> fp8;  ///< nothing: products have the compute dtype of `precision`
  std::optional<double> peak_flops;   ///< of --peak-flops
  std::int64_t parameters = 0;
  std::vector<comm::SharedSetting> command;  ///< what the ranks' commands must have alike, beside these settings
};

/// Makes the default global batch one that ranks and microbatches divide. Throws InvalidUsage if they don't divide the
/// one that is given.
void fit_batch(StepOptions& options, int ranks);

/// Reads the model and the data's head, and checks the requirements of each strategy on the world. Throws InvalidUsage:
/// one line with the remedy.
TrainPlan make_plan(const TrainOptions& options, int ranks);

/// Why a device graph can't contain the steps of `plan`, with the remedy; "" if nothing is known against it.
std::string graph_obstacle(const TrainPlan& plan);
/// What --graphs or --no-graphs, or their absence, mean for `plan`. Throws InvalidUsage for --graphs with an obstacle.
GraphUse graph_use_of(const TrainPlan& plan);

/// The name of what multiplies: "fp8", or that of the compute dtype. The key of a machine's peaks.
std::string product_dtype_of(const TrainPlan& plan);

/// The properties of a step that its cost depends on.
fsdp::StepShape step_shape_of(const StepOptions& o);

/// The engine's options for one strategy of the plan. Throws InvalidUsage if it can't run on this world.
fsdp::EngineOptions engine_options(const TrainPlan& plan, const std::string& strategy);

/// In how many parts these axes of the mesh divide a flat parameter.
int parts_over(const fsdp::Axes& axes, const fsdp::MeshShape& mesh);

/// The steps from one synchronization of the replicas to the next: 1 where gradients are reduced in every step.
int sync_period(const fsdp::Strategy& strategy);

/// What the ranks of a training must have alike beside the engine's options, by the names of its options. Of data and
/// weights a sample is taken, and of outputs whether there are any: paths may differ between hosts.
std::vector<comm::SharedSetting> shared_settings_of(const TrainPlan& plan);

/// The names of the strategies to run: those of --strategies, or by default those that can run, and `left_out` gets the
/// reasons of the others. Throws InvalidUsage if one that was asked for can't run, or none can.
std::vector<std::string> strategies_of(const TrainPlan& plan, std::vector<std::string>& left_out);

/// With --accumulate: one line with what each --reduce-when would send and keep, before any rank starts; else "".
std::string accumulation_note(const TrainPlan& plan, const std::string& strategy);

/// Throws InvalidUsage if an output of the run can't be written or would replace an input.
void check_results(const TrainOptions& options);

/// Prints on standard error which options have no effect under any of the strategies that run. Called once, by the
/// process that starts the ranks or by rank 0.
void warn_ineffective_options(const TrainOptions& o, const std::vector<std::string>& strategies);
/// The same for options of steps that are simulated.
void warn_ineffective_options(const StepOptions& o, const std::vector<std::string>& strategies);

/// How the ranks of a training join their world.
WorldInitOptions world_of(const TrainPlan& plan, std::shared_ptr<base::MemoryTracker> memory_tracker);

/// Returns the spec that runs this program with these arguments as the ranks of a training. The ranks are bound to
/// their shares of the cores if there is a core for each computing thread; if there are more threads than cores, the
/// scheduler balances better than fixed shares would.
LaunchSpec training_launch_spec(const TrainPlan& plan, std::vector<std::string> arguments);

}  // namespace tessera::tools
