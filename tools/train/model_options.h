// The options of the model: which one, the source of its values, its dtypes, and what its backward computes again.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/fsdp/precision.h"
#include "tessera/nn/context.h"
#include "tessera/nn/fp8.h"

namespace tessera::tools {

/// As given on the command line; see the help texts in model_options.cpp.
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
};

void add_model_options(CLI::App& command, ModelOptions& o);      ///< the model and its adapters
void add_init_options(CLI::App& command, ModelOptions& o);       ///< directories of its first values
void add_precision_options(CLI::App& command, ModelOptions& o);  ///< its dtypes
void add_recompute_options(CLI::App& command, ModelOptions& o);  ///< what backward computes again

/// The dtypes of --precision and --reduce-dtype. Throws InvalidUsage.
fsdp::Precision precision_of(const ModelOptions& o);

/// The scaling of --precision fp8; nothing for other precisions. Throws InvalidUsage for a scaling without it.
std::optional<nn::Fp8Scaling> fp8_of(const ModelOptions& o);

/// The outputs of --recompute.
nn::RecomputedOutputs recomputed_of(const ModelOptions& o);

}  // namespace tessera::tools
