// The options that train and compare share, and the plan made from them.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/fsdp/engine.h"
#include "tessera/nn/data.h"
#include "tessera/nn/fp8.h"
#include "tessera/nn/lora.h"
#include "tessera/nn/lr_schedule.h"
#include "tessera/nn/models/config.h"
#include "tessera/nn/optimizer.h"
#include "tessera/nn/products.h"
#include "tools/cli/link_options.h"
#include "tools/launch/launcher.h"
#include "tools/train/graph_use.h"

namespace tessera::tools {

/// As given on the command line; see the help texts in options.cpp.
struct TrainOptions : LinkOptions {
  std::optional<int> ranks;
  std::string backend = "shm";
  bool backend_given = false;
  std::string device = "cpu";
  std::string model = "gpt-mini";
  bool model_given = false;
  std::vector<std::string> data;
  std::string data_format = "bytes";
  std::int64_t steps = 20;
  std::int64_t global_batch = 12;
  bool batch_given = false;
  std::optional<std::int64_t> seq_len;
  double lr = 1e-3;
  std::string schedule = "constant";
  std::int64_t warmup = 0;
  std::string optimizer = "adamw";
  std::vector<double> betas = {0.9, 0.999};
  nn::OptimizerConfig optimizer_config;
  std::uint64_t seed = 0;
  std::string strategy = "fsdp";        // train
  std::vector<std::string> strategies;  // compare; empty: those of all five that can run
  std::vector<std::string> collectives;
  fsdp::SyncOverrides period;
  std::string mesh;
  std::string wrap = "block";
  std::optional<int> threads;
  std::string precision = "f32";
  std::string fp8_scaling;  // empty: current
  std::vector<std::string> f32_modules;
  std::string reduce_dtype;  // empty: as precision
  double clip_norm = 0;
  std::string norm_type = "2";
  std::int64_t accumulate = 1;
  std::string reduce_when;  // empty: every microbatch
  std::string reshard_after_backward;
  int prefetch = 1;
  std::string backward_prefetch = "pre";
  int limit_all_gathers = 0;
  std::string reshard_after_forward;
  bool cpu_offload = false;
  bool checkpoint_activations = false;
  std::vector<std::string> recompute;
  std::optional<bool> graphs;  // nothing: where a step allows it
  std::string init;
  std::optional<std::int64_t> lora;  // rank
  std::optional<double> lora_alpha;
  std::vector<std::string> lora_targets;
  std::string quantize;
  std::string init_adapter;
  std::string peak_flops;
  bool progress = false;  // train: this process is a rank whose launcher has a terminal
  std::string save;       // train
  std::optional<std::int64_t> save_every;
  std::optional<int> keep_last;
  std::string resume;
  std::map<std::string, std::string> given;  // train: of those that --resume restores: name without dashes, text
  std::vector<std::string> notes;            // train: what differs from the run that --resume continues
  std::string export_dir;
  std::string export_adapter;  // train
  std::string eval;
  std::string json;
  std::string log_csv;  // train
  std::string trace;
  bool simulated = false;  // the model gets no values
  std::string flight_recorder;
  std::string report;                             // compare
  nn::Products products = nn::Products::library;  // unless TESSERA_PRODUCTS says otherwise
};

/// Adds the options that determine what a step does and costs.
void add_step_options(CLI::App& command, TrainOptions& options);

/// Adds the options of ranks that run: how many, what connects them, and their data.
void add_world_options(CLI::App& command, TrainOptions& options);

/// Adds the options that train and compare share, those of a step included.
void add_train_options(CLI::App& command, TrainOptions& options);

/// The options with names, files and numbers resolved. All errors are detected here, before a rank is started.
struct TrainPlan {
  TrainOptions options;
  int ranks = 1;
  int ranks_per_host = 1;                ///< for the default mesh
  std::optional<comm::SlowLinks> links;  ///< with --link
  bool fits_links = false;               ///< `links` only record, and the real ones are measured after the training
  int threads = 1;                       ///< compute threads per rank
  nn::Products products = nn::Products::library;
  nn::ModelConfig model;
  std::optional<nn::LoraOptions> lora;  ///< nothing: all parameters are trained
  bool quantized = false;               ///< the weights of linear layers are in NF4
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
};

/// Makes the default global batch one that ranks and microbatches divide. Throws InvalidUsage if they don't divide the
/// one that is given.
void fit_batch(TrainOptions& options, int ranks);

/// Reads the model and the data's head, and checks the requirements of each strategy on the world. Throws InvalidUsage:
/// one line with the remedy.
TrainPlan make_plan(const TrainOptions& options, int ranks);

/// The properties of a step that its cost depends on.
fsdp::StepShape step_shape_of(const TrainOptions& options);

/// The dtypes of --precision and --reduce-dtype. Throws InvalidUsage.
fsdp::Precision precision_of(const TrainOptions& options);

/// The outputs of --recompute.
nn::RecomputedOutputs recomputed_of(const TrainOptions& options);

/// The scaling of --precision fp8; nothing for other precisions. Throws InvalidUsage for a scaling without it.
std::optional<nn::Fp8Scaling> fp8_of(const TrainOptions& options);

/// The name of what multiplies: "fp8", or that of the compute dtype. The key of a machine's peaks.
std::string product_dtype_of(const TrainPlan& plan);

/// The optimizer's settings, checked. Throws InvalidUsage.
nn::OptimizerConfig optimizer_of(const TrainOptions& options);

/// Throws InvalidUsage if an output of the run can't be written or would replace an input.
void check_results(const TrainOptions& options);

/// Prints on standard error which options have no effect. Called once, by the process that starts the ranks or by rank
/// 0.
void warn_ineffective_options(const TrainOptions& options);

/// Throws InvalidUsage if options of a sync period are given but no strategy has one.
void check_period(const TrainOptions& options);

/// With --accumulate: one line with what each --reduce-when would send and keep, before any rank starts; else "".
std::string accumulation_note(const TrainPlan& plan, const std::string& strategy);

/// Throws InvalidUsage for a sync period with --precision f16: replicas would skip different steps of a scaled loss.
void refuse_scaled_replicas(const fsdp::Strategy& strategy, const fsdp::Precision& precision);

/// The engine's options for one strategy of the plan. Throws InvalidUsage if it can't run on this world.
fsdp::EngineOptions engine_options(const TrainPlan& plan, const std::string& strategy);

/// Returns the spec that runs this program with these arguments as the ranks of a training. The ranks are bound to
/// their shares of the cores if there is a core for each computing thread; if there are more threads than cores, the
/// scheduler balances better than fixed shares would.
LaunchSpec training_launch_spec(const TrainPlan& plan, std::vector<std::string> arguments);

}  // namespace tessera::tools
