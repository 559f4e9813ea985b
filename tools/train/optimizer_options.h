// The options of the optimizer: its kind and settings, its learning rates, and the norm to which gradients are clipped.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/nn/lr_schedule.h"
#include "tessera/nn/optimizer.h"

namespace tessera::tools {

/// As given on the command line; see the help texts in optimizer_options.cpp.
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

void add_norm_options(CLI::App& command, OptimizerOptions& o);
void add_optimizer_options(CLI::App& command, OptimizerOptions& o);   ///< what its memory depends on
void add_optimizer_settings(CLI::App& command, OptimizerOptions& o);  ///< other settings
void add_schedule_options(CLI::App& command, OptimizerOptions& o);

/// The optimizer's settings, checked. Throws InvalidUsage.
nn::OptimizerConfig optimizer_of(const OptimizerOptions& o);

/// The learning rates of that many steps. Throws InvalidUsage.
nn::LrSchedule schedule_of(const OptimizerOptions& o, std::int64_t steps);

/// The norm of --norm-type.
nn::kernels::Norm norm_of(const OptimizerOptions& o);

}  // namespace tessera::tools
