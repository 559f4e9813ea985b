#include "tessera/nn/lora.h"

#include "tessera/nn/layers/linear.h"

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

}  // namespace tessera::nn
