// The options of a training, in groups: those of its model, batch, optimizer and sharding make its steps; the others
// say how ranks run them. All are as given on the command line; see the help texts in options.cpp.
#pragma once

#include <CLI/CLI.hpp>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/fsdp/precision.h"
#include "tessera/fsdp/strategy.h"
#include "tessera/nn/context.h"
#include "tessera/nn/fp8.h"
#include "tessera/nn/lr_schedule.h"
#include "tessera/nn/optimizer.h"
#include "tessera/nn/products.h"
#include "tools/cli/link_options.h"

namespace tessera::tools {

/// Which model, the source of its values, its dtypes, and what its backward computes again.
struct ModelOptions {
  std::string model = "gpt-mini";
  bool model_given = false;
  std::optional<std::int64_t> lora;  ///< rank
  std::optional<double> lora_alpha;
  std::vector<std::string> lora_targets;
  std::string quantize;
  std::string init;
  std::string init_adapter;
  std::string precision = "f32";
  std::string fp8_scaling;  ///< empty: current
  std::vector<std::string> f32_modules;
  std::string reduce_dtype;  ///< empty: as precision
  bool checkpoint_activations = false;
  std::vector<std::string> recompute;
  bool simulated = false;  ///< the model gets no values
  bool untimed = false;    ///< simulated, for calls and memory: the model may compute by another library
};

/// The data, and how an optimizer step divides them.
struct BatchOptions {
  std::vector<std::string> data;
  std::string data_format = "bytes";
  std::int64_t global_batch = 12;
  bool batch_given = false;
  std::optional<std::int64_t> seq_len;
  std::int64_t accumulate = 1;
  std::string reduce_when;  ///< empty: every microbatch
};

/// The optimizer, its learning rates, and the norm to which gradients are clipped.
struct OptimizerOptions {
  std::string optimizer = "adamw";
  std::vector<double> betas = {0.9, 0.999};
  nn::OptimizerConfig optimizer_config;
  double lr = 1e-3;
  std::string schedule = "constant";
  std::int64_t warmup = 0;
  double clip_norm = 0;
  std::string norm_type = "2";
};

/// Those that compare and plan run by default, as far as they can.
inline constexpr std::array kDefaultStrategies = {"ddp", "zero1", "zero2", "fsdp", "hsdp"};

/// The strategy and its mesh, units and collectives, and what is unsharded when.
struct ShardingOptions {
  std::string strategy = "fsdp";        ///< of one run
  std::vector<std::string> strategies;  ///< of several; empty: kDefaultStrategies
  std::string mesh;
  std::vector<std::string> collectives;
  fsdp::SyncOverrides period;
  std::string wrap = "block";
  int prefetch = 1;
  std::string backward_prefetch = "pre";
  int limit_all_gathers = 0;
  std::string reshard_after_forward;
  std::string reshard_after_backward;
  bool cpu_offload = false;
};

/// What determines what a step does and costs.
struct StepOptions : ModelOptions, BatchOptions, OptimizerOptions, ShardingOptions {};

/// The ranks that run.
struct WorldOptions {
  std::optional<int> ranks;
  std::string backend = "shm";
  bool backend_given = false;
  std::optional<int> threads;
};

/// How long they train, on what, and what they write.
struct RunOptions : WorldOptions, LinkOptions {
  std::string device = "cpu";
  std::optional<bool> graphs;                     ///< nothing: where a step allows it
  nn::Products products = nn::Products::library;  ///< unless TESSERA_PRODUCTS says otherwise
  std::int64_t steps = 20;
  std::uint64_t seed = 0;
  std::string eval;
  std::string json;
  std::string peak_flops;
  std::string flight_recorder;
  std::string trace;
  std::string report;     ///< compare
  std::string log_csv;    ///< train, as all below
  bool progress = false;  ///< this process is a rank whose launcher has a terminal
  std::string save;
  std::optional<std::int64_t> save_every;
  std::optional<int> keep_last;
  std::string resume;
  std::map<std::string, std::string> given;  ///< of those that --resume restores: name without dashes, text
  std::vector<std::string> notes;            ///< what differs from the run that --resume continues
  std::string export_dir;
  std::string export_adapter;
};

struct TrainOptions : StepOptions, RunOptions {};

void add_step_options(CLI::App& command, StepOptions& o);
void add_strategy_option(CLI::App& command, ShardingOptions& o);

/// Adds the options of ranks that run: how many, what connects them, and their data.
void add_world_options(CLI::App& command, WorldOptions& world, BatchOptions& batch);

/// Adds the options that train and compare share, those of a step included.
void add_train_options(CLI::App& command, TrainOptions& o);

/// The dtypes of --precision and --reduce-dtype. Throws InvalidUsage.
fsdp::Precision precision_of(const ModelOptions& o);

/// The scaling of --precision fp8; nothing for other precisions. Throws InvalidUsage for a scaling without it.
std::optional<nn::Fp8Scaling> fp8_of(const ModelOptions& o);

/// The outputs of --recompute.
nn::RecomputedOutputs recomputed_of(const ModelOptions& o);

/// The optimizer's settings, checked. Throws InvalidUsage.
nn::OptimizerConfig optimizer_of(const OptimizerOptions& o);

/// The learning rates of that many steps. Throws InvalidUsage.
nn::LrSchedule schedule_of(const OptimizerOptions& o, std::int64_t steps);

/// The norm of --norm-type.
nn::kernels::Norm norm_of(const OptimizerOptions& o);

/// Throws InvalidUsage if options of a sync period are given but no strategy has one.
void check_period(const ShardingOptions& o);

/// Throws InvalidUsage for a sync period with --precision f16: replicas would skip different steps of a scaled loss.
void refuse_scaled_replicas(const fsdp::Strategy& strategy, const fsdp::Precision& precision);

}  // namespace tessera::tools
