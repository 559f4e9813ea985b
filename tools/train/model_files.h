// The model of a run: what it consists of, where its values come from, and the folders that are written of it.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/fsdp/engine.h"
#include "tessera/fsdp/gradient_scaler.h"
#include "tessera/nn/lora.h"
#include "tessera/nn/models/causal_model.h"
#include "tessera/nn/safetensors.h"
#include "tools/train/options.h"

namespace tessera::tools {

/// The adapters that a run trains: of --init-adapter or the checkpoint it goes on from, else as --lora says; nothing
/// where everything is trained. Throws InvalidUsage where these don't agree.
std::optional<nn::LoraOptions> lora_of(const TrainOptions& options, const std::string& checkpoint,
                                       const nn::ModelConfig& model);
/// Of a checkpoint that train wrote.
std::optional<nn::LoraOptions> lora_in(const std::string& checkpoint);

/// Whether the model's linear weights are in NF4: by --quantize, or as in the checkpoint. Throws InvalidUsage where
/// that can't be.
bool quantized_of(const TrainOptions& options, const std::string& checkpoint, bool adapters);
bool quantized_in(const std::string& checkpoint);
inline constexpr const char *kQuantizeAttribute = "quantize", *kNf4 = "nf4";

/// What a model's folders have: without adapters, nothing encoded.
std::vector<nn::SafetensorsTensor> dense_tensors(const nn::ModelConfig& config);
/// The bytes that an engine or a checkpoint shows as numbers, decoded; `range` of the tensor's elements.
void decode_numbers(std::span<const float> numbers, const nn::Shape& shape, nn::ElementRange range, float* out);

/// Under which name a checkpoint keeps the adapters' rank, alpha and targets, and what it keeps: the text of PEFT's
/// adapter_config.json.
inline constexpr const char* kLoraAttribute = "lora";
std::string lora_json_of(const TrainPlan& plan);

/// --precision and --f32-modules. Throws InvalidUsage for a name that means nothing, or modules that share a parameter
/// and would differ.
void set_dtypes(nn::Module& model, base::DType dtype, const std::vector<std::string>& f32_modules);

/// Adapters, types and checkpointed activations as the plan says. Before an engine has the model.
nn::CausalModel& prepare(nn::CausalModel& model, const TrainPlan& plan);

/// Values from the run's checkpoint, or drawn and then read from --init and --init-adapter. `scaler`:
/// null where there is none. Collective.
void load_values(const TrainPlan& plan, fsdp::Engine& engine, fsdp::GradientScaler* scaler);

/// Writes --export (with adapters merged) and --export-adapter, on rank 0. Collective.
void export_folders(const TrainPlan& plan, fsdp::Engine& engine, int rank);

}  // namespace tessera::tools
