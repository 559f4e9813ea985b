// The model of a run: its parts, the source of its values, and the directories that are exported from it.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/fsdp/checkpoint.h"
#include "tessera/fsdp/engine.h"
#include "tessera/fsdp/gradient_scaler.h"
#include "tessera/nn/lora.h"
#include "tessera/nn/models/causal_model.h"
#include "tessera/nn/safetensors.h"
#include "tools/train/plan.h"

namespace tessera::tools {

/// The adapters that a run trains: those of --init-adapter or of the checkpoint that it resumes, else as in --lora;
/// nothing if all parameters are trained. Throws InvalidUsage if these sources disagree.
std::optional<nn::LoraOptions> lora_of(const TrainOptions& options, const std::string& checkpoint,
                                       const nn::ModelConfig& model);
/// The adapters of a checkpoint that train wrote.
std::optional<nn::LoraOptions> lora_in(const std::string& checkpoint);

/// Whether the model's linear weights are in NF4: by --quantize, or as in the checkpoint. Throws InvalidUsage if that
/// is impossible.
bool quantized_of(const TrainOptions& options, const std::string& checkpoint, bool adapters);
bool quantized_in(const std::string& checkpoint);
inline constexpr const char *kQuantizeAttribute = "quantize", *kNf4 = "nf4";

/// Throws InvalidUsage unless a checkpoint that train wrote has the tensors of its model, adapters and encodings, no
/// others, and in their shapes. Reads no data.
void check_saved(const fsdp::Checkpoint& checkpoint, const nn::ModelConfig& config);
/// The same of all files that the run's values come from. `task`: of make_task().
void check_sources(fsdp::TrainingTask& task, const TrainPlan& plan);

/// The tensors of a model's directory: without adapters, nothing encoded.
std::vector<nn::SafetensorsTensor> dense_tensors(const nn::ModelConfig& config);
/// Decodes bytes that an engine or a checkpoint presents as numbers; `range` of the tensor's elements.
void decode_numbers(std::span<const float> numbers, const nn::Shape& shape, nn::ElementRange range, float* out);

/// The attribute under which a checkpoint stores the adapters' rank, alpha and targets, and its value: the text of
/// PEFT's adapter_config.json.
inline constexpr const char* kLoraAttribute = "lora";
std::string lora_json_of(const TrainPlan& plan);

/// The directory that the model's first values came from, by --init of this run or of one that it continues; "": none.
std::string origin_of(const TrainPlan& plan);
std::string origin_in(const std::string& checkpoint);
inline constexpr const char* kOriginAttribute = "init";

/// Throws InvalidUsage that names a tensor of --init or --init-adapter with a value that --precision f16 can't hold.
/// `task`: of make_task().
void check_f16_values(fsdp::TrainingTask& task, const TrainPlan& plan);

/// Applies --precision and --f32-modules. Throws InvalidUsage for an unknown name, or for modules that share a
/// parameter and would differ.
void set_dtypes(nn::Module& model, base::DType dtype, const std::vector<std::string>& f32_modules);

/// Loads values from the run's checkpoint, or initializes them randomly and then reads --init and --init-adapter.
/// `scaler`: null if there is none. Collective.
void load_values(const TrainPlan& plan, fsdp::Engine& engine, fsdp::GradientScaler* scaler);

/// Writes --export (with adapters merged) and --export-adapter, on rank 0. Collective.
void export_directories(const TrainPlan& plan, fsdp::Engine& engine, int rank);

}  // namespace tessera::tools
