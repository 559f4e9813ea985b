#include "tessera/nn/peft_adapter.h"

#include <algorithm>
#include <set>

#include "tessera/base/atomic_file.h"
#include "tessera/nn/io/json_fields.h"

namespace tessera::nn {
namespace {

using internal::Fields;
using internal::Json;

constexpr std::string_view kModel = "base_model.model.", kGpt2 = "transformer.";
constexpr const char *kConfig = "/adapter_config.json", *kTensors = "/adapter_model.safetensors";

/// PEFT's name of a tensor without the prefixes that the model classes add.
std::string canonical(std::string_view key) {
  for (const std::string_view prefix : {kModel, kGpt2})
    if (key.starts_with(prefix)) key.remove_prefix(prefix.size());
  return std::string(key);
}

/// Fields of PEFT's LoraConfig that are read, or that don't matter for an adapter that was saved. Every other field
/// must be unset.
constexpr std::string_view kFields[] = {
    "peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "bias", "init_lora_weights",
    // where it comes from and what it is for
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type",
    // of the training that wrote it, or of how its values were initialized
    "corda_config", "eva_config", "loftq_config", "lora_dropout", "lora_ga_config", "runtime_config",
    // PEFT sets it by the layer, whatever the file says
    "fan_in_fan_out",
    // of other fields, which must be unset
    "ensure_weight_tying", "layers_pattern", "megatron_core", "qalora_group_size"};

/// Initializations that leave the model's weights as they are. The others change them when PEFT loads the adapter.
constexpr std::string_view kInitializations[] = {"eva", "gaussian", "lora_ga", "orthogonal"};

void check_initialization(const Fields& fields) {
  const char* const field = "init_lora_weights";
  if (!fields.has(field) || fields.at(field).is_boolean()) return;
  const std::string name = fields.text(field, "");
  if (std::ranges::find(kInitializations, name) == std::end(kInitializations))
    fields.fail("'init_lora_weights: " + name.substr(0, 80) +
                "' is not supported: it changes the weights of the model; save the adapter with PEFT's "
                "save_pretrained(..., path_initial_model_for_weight_conversion=...), which makes it a plain LoRA");
}

/// Throws for settings that change the mathematics and are not supported.
void refuse_others(const Fields& fields) {
  const std::string type = fields.text("peft_type", "?");
  if (type != "LORA") fields.fail("peft_type '" + type + "' is not supported; supported: LORA");
  if (fields.text("bias", "none") != "none") fields.fail("trained biases ('bias') are not supported");
  check_initialization(fields);
  fields.only_known(kFields);
}

std::vector<std::string> targets_of(const Fields& fields) {
  std::vector<std::string> targets;
  if (fields.has("target_modules") && fields.at("target_modules").is_array())
    for (const Json& name : fields.at("target_modules"))
      if (name.is_string()) targets.push_back(canonical(name.get<std::string>()));
  if (targets.empty()) fields.fail("'target_modules' must be a list of names");
  std::sort(targets.begin(), targets.end());  // files store a set
  return targets;
}

std::vector<SafetensorsTensor> prefixed(std::vector<SafetensorsTensor> tensors, const std::string& prefix) {
  for (SafetensorsTensor& tensor : tensors) tensor.name = prefix + tensor.name;
  return tensors;
}

std::string prefix_of(const ModelConfig& config) {
  return std::string(kModel) + std::string(config.family == ModelConfig::Family::gpt2 ? kGpt2 : "");
}

}  // namespace

std::string lora_json(const LoraOptions& options, const ModelConfig& config, const std::string& base) {
  std::vector<std::string> targets = options.targets;
  std::sort(targets.begin(), targets.end());
  return nlohmann::ordered_json{{"peft_type", "LORA"},
                                {"task_type", "CAUSAL_LM"},
                                {"base_model_name_or_path", base},
                                {"r", options.rank},
                                {"lora_alpha", options.alpha},
                                {"use_rslora", options.rank_stabilized},
                                {"lora_dropout", 0.0},
                                {"target_modules", targets},
                                {"bias", "none"},
                                {"fan_in_fan_out", config.family == ModelConfig::Family::gpt2},
                                {"init_lora_weights", true},
                                {"inference_mode", true}}
      .dump();
}

LoraOptions parse_lora(std::string_view text, const std::string& origin) {
  const Json json = internal::parse_object(text, origin);
  const Fields fields(json, origin);
  refuse_others(fields);
  LoraOptions options{.rank = fields.integer("r"),
                      .alpha = fields.number("lora_alpha", 8),
                      .targets = targets_of(fields),
                      .rank_stabilized = fields.flag("use_rslora", false)};
  if (options.rank < 1 || options.rank > kMaxLoraRank || !(options.alpha > 0))
    fields.fail("'r' is " + std::to_string(options.rank) + ", needs 1 to " + std::to_string(kMaxLoraRank) +
                "; 'lora_alpha' must be above 0");
  return options;
}

PeftAdapterReader::PeftAdapterReader(const std::string& directory)
    : directory_(directory),
      options_(parse_lora(internal::read_text(directory + kConfig), directory + kConfig)),
      file_(directory + kTensors) {
  for (const SafetensorsEntry& entry : file_.entries())
    if (!places_.emplace(canonical(entry.name), &entry).second)
      throw InvalidUsage(file_.path() + ": '" + canonical(entry.name).substr(0, 100) + "' appears twice");
}

void PeftAdapterReader::check(const std::vector<SafetensorsTensor>& needed) const {
  const auto fail = [&](const std::string& what) {
    throw InvalidUsage(directory_ + ": does not fit the model and its targets: " + what);
  };
  std::set<std::string_view> known;
  for (const SafetensorsTensor& tensor : needed) {
    known.insert(tensor.name);
    const auto found = places_.find(tensor.name);
    if (found == places_.end()) fail("'" + tensor.name + "' is missing");
    if (found->second->shape != tensor.shape)
      fail("'" + tensor.name + "' has shape " + to_string(found->second->shape) + ", needs " + to_string(tensor.shape));
    if (!found->second->holds(tensor.dtype))
      fail("'" + tensor.name + "' is " + found->second->dtype + ", needs a floating-point type");
  }
  for (const auto& [name, entry] : places_)
    if (!known.contains(name)) fail("'" + name.substr(0, 100) + "' is unexpected");
}

void PeftAdapterReader::read(std::string_view name, ElementRange range, float* out) const {
  const auto found = places_.find(name);
  if (found == places_.end()) throw InvalidUsage(directory_ + ": has no tensor '" + std::string(name) + "'");
  file_.read(*found->second, range, out);
}

PeftAdapterWriter::PeftAdapterWriter(const std::string& directory, std::string json, const ModelConfig& config,
                                     const std::vector<SafetensorsTensor>& tensors)
    : directory_(made_directory(directory)),
      json_(std::move(json)),
      prefix_(prefix_of(config)),
      writer_(directory + kTensors, prefixed(tensors, prefix_), {{"format", "pt"}}) {}

void PeftAdapterWriter::write(std::string_view name, ElementRange range, const float* values) {
  writer_.write(prefix_ + std::string(name), range, values);
}

void PeftAdapterWriter::commit() {
  commit_described(directory_ + kConfig, json_ + "\n", [&] { writer_.commit(); });
}

}  // namespace tessera::nn
