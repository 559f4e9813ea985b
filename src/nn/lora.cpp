#include "tessera/nn/lora.h"

#include <algorithm>
#include <set>

#include "tessera/base/atomic_file.h"
#include "tessera/nn/io/json_fields.h"
#include "tessera/nn/layers/linear.h"
#include "tessera/nn/peft_adapter.h"

namespace tessera::nn {
namespace {

constexpr std::string_view kA = ".lora_A.weight", kB = ".lora_B.weight", kWeight = ".weight";

/// Matches like PEFT: the whole path, or a suffix of its parts.
bool names(std::string_view target, std::string_view path) {
  return path == target ||
         (path.size() > target.size() && path.ends_with(target) && path[path.size() - target.size() - 1] == '.');
}

void check(const LoraOptions& options) {
  if (options.rank < 1 || options.rank > kMaxLoraRank)
    throw InvalidUsage("lora: rank " + std::to_string(options.rank) + ", needs 1 to " + std::to_string(kMaxLoraRank));
  if (!(options.alpha > 0))
    throw InvalidUsage("lora: alpha " + std::to_string(options.alpha) + ", needs a number above 0");
  if (options.targets.empty()) throw InvalidUsage("lora: no targets; name linear layers");
}

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

std::vector<std::string> default_lora_targets(const ModelConfig& config) {
  if (config.family == ModelConfig::Family::gpt2) return {"c_attn"};
  return {"q_proj", "v_proj"};
}

int quantize_nf4(Module& model) {
  int quantized = 0;
  for (Module* module : model.modules())
    if (auto* linear = dynamic_cast<Linear*>(module)) {
      linear->quantize();
      ++quantized;
    }
  return quantized;
}

bool is_adapter(std::string_view name) { return name.ends_with(kA) || name.ends_with(kB); }

int add_lora(Module& model, const LoraOptions& options) {
  check(options);
  for (const auto& parameter : model.parameters()) {
    Tensor tensor = parameter->tensor();
    tensor.set_requires_grad(false);
  }
  std::vector<Linear*> layers;
  for (Module* module : model.modules())
    if (auto* linear = dynamic_cast<Linear*>(module)) layers.push_back(linear);
  for (const std::string& target : options.targets) {
    bool found = false;
    for (const Linear* layer : layers) found = found || names(target, layer->path());
    if (!found)
      throw InvalidUsage("lora: of the targets (an adapter's target_modules), '" + target +
                         "' matches no linear layer; give the end of a layer's name");
  }
  int adapted = 0;
  for (Linear* layer : layers) {
    bool wanted = false;
    for (const std::string& target : options.targets) wanted = wanted || names(target, layer->path());
    if (!wanted) continue;
    layer->add_adapter(options.rank, options.factor());
    ++adapted;
  }
  return adapted;
}

LoraMerger::LoraMerger(const ModelConfig& config, const LoraOptions& options)
    : in_out_(config.family == ModelConfig::Family::gpt2), factor_(static_cast<float>(options.factor())) {}

void LoraMerger::add(std::string_view name, const Shape& shape, std::span<const float> values) {
  if (shape.size() != 2 || static_cast<std::size_t>(count_of(shape)) != values.size())
    throw InvalidUsage("lora: '" + std::string(name) + "' of " + to_string(shape) + " is no matrix of " +
                       std::to_string(values.size()) + " values");
  factors_[std::string(name)] = {shape, {values.begin(), values.end()}};
}

void LoraMerger::merge(std::string_view name, ElementRange range, float* values) const {
  if (!name.ends_with(kWeight)) return;
  const std::string layer(name.substr(0, name.size() - kWeight.size()));
  const auto a = factors_.find(layer + std::string(kA)), b = factors_.find(layer + std::string(kB));
  if (a == factors_.end() || b == factors_.end()) return;
  const std::int64_t rank = a->second.shape[0], in = a->second.shape[1], out = b->second.shape[0];
  if (b->second.shape[1] != rank || range.begin < 0 || range.end > count_of({in, out}))
    throw InvalidUsage("lora: the factors " + to_string(a->second.shape) + " and " + to_string(b->second.shape) +
                       " don't fit '" + std::string(name) + "'");
  const float* const down = a->second.values.data();
  const float* const up = b->second.values.data();
  const std::int64_t columns = in_out_ ? out : in;
  for (std::int64_t e = range.begin; e < range.end; ++e) {
    const std::int64_t i = in_out_ ? e / columns : e % columns, o = in_out_ ? e % columns : e / columns;
    float sum = 0;
    for (std::int64_t r = 0; r < rank; ++r) sum += up[o * rank + r] * down[r * in + i];
    values[e - range.begin] += factor_ * sum;
  }
}

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
