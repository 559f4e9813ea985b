// The options of a training, in groups: those of its model, batch, optimizer and sharding make its steps; the others
// say how ranks run them.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/nn/products.h"
#include "tools/cli/link_options.h"
#include "tools/train/batch_options.h"
#include "tools/train/model_options.h"
#include "tools/train/optimizer_options.h"
#include "tools/train/sharding_options.h"

namespace tessera::tools {

/// What determines what a step does and costs.
struct StepOptions : ModelOptions, BatchOptions, OptimizerOptions, ShardingOptions {};

/// The ranks that run.
struct WorldOptions {
  std::optional<int> ranks;
  std::string backend = "shm";
  bool backend_given = false;
  std::optional<int> threads;
};

/// How long they train, on what, and what they write. As given on the command line; see the help texts in options.cpp.
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

/// Adds the options of ranks that run: how many, what connects them, and their data.
void add_world_options(CLI::App& command, WorldOptions& world, BatchOptions& batch);

/// Adds the options that train and compare share, those of a step included.
void add_train_options(CLI::App& command, TrainOptions& o);

}  // namespace tessera::tools
