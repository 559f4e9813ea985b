#include "tools/model_files.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/fsdp/checkpoint.h"
#include "tessera/nn/activation_checkpoint.h"
#include "tessera/nn/adapter_hf.h"
#include "tessera/nn/checkpoint_hf.h"
#include "tools/saving.h"

namespace tessera::tools {

using base::InvalidUsage;

namespace {

std::vector<nn::SafetensorsTensor> tensors_of(const nn::Module& model, bool adapters) {
  std::vector<nn::SafetensorsTensor> tensors;
  for (const auto& parameter : model.parameters())
    if (nn::is_adapter(parameter->name()) == adapters) tensors.push_back({parameter->name(), parameter->shape()});
  return tensors;
}

/// What the command line says of adapters whose rank, alpha and targets are in `origin`.
void check_given(const TrainOptions& o, const std::optional<nn::LoraOptions>& there, const std::string& origin) {
  const auto refuse = [&](const std::string& option, const std::string& given, const std::string& is) {
    throw InvalidUsage(
        fmt::format("{} {} is not what is in {}, which has {}; leave it out", option, given, origin, is));
  };
  if (!there) {
    if (o.lora) refuse("--lora", std::to_string(*o.lora), "no adapters");
    return;
  }
  if (o.lora && *o.lora != there->rank) refuse("--lora", std::to_string(*o.lora), std::to_string(there->rank));
  if (o.lora_alpha && *o.lora_alpha != there->alpha)
    refuse("--lora-alpha", fmt::format("{}", *o.lora_alpha), fmt::format("{}", there->alpha));
  std::vector<std::string> targets = o.lora_targets;
  std::sort(targets.begin(), targets.end());
  if (!targets.empty() && targets != there->targets)
    refuse("--lora-targets", fmt::format("{}", fmt::join(targets, ",")),
           fmt::format("{}", fmt::join(there->targets, ",")));
}

}  // namespace

std::optional<nn::LoraOptions> lora_in(const std::string& folder) {
  const fsdp::Checkpoint checkpoint(folder);
  const auto found = checkpoint.attributes().find(kLoraAttribute);
  if (found == checkpoint.attributes().end()) return std::nullopt;
  return nn::parse_lora(found->second, folder);
}

std::optional<nn::LoraOptions> lora_of(const TrainOptions& o, const std::string& checkpoint,
                                       const nn::ModelConfig& model) {
  std::optional<nn::LoraOptions> lora;
  if (!o.init_adapter.empty()) {
    if (o.init.empty()) throw InvalidUsage("--init-adapter needs --init, the model that the adapter belongs to");
    lora = nn::AdapterFolder(o.init_adapter).options();
    check_given(o, lora, "--init-adapter " + o.init_adapter);
  } else if (!checkpoint.empty()) {
    lora = lora_in(checkpoint);
    check_given(o, lora, "--resume " + o.resume);
  } else if (o.lora) {
    lora = {.rank = *o.lora, .alpha = o.lora_alpha.value_or(8), .targets = o.lora_targets};
    if (lora->targets.empty()) lora->targets = nn::default_lora_targets(model);
    std::sort(lora->targets.begin(), lora->targets.end());
  }
  if (lora) return lora;
  for (const auto& [given, name] : {std::pair(o.lora_alpha.has_value(), "--lora-alpha"),
                                    {!o.lora_targets.empty(), "--lora-targets"},
                                    {!o.export_adapter.empty(), "--export-adapter"}})
    if (given) throw InvalidUsage(std::string(name) + " needs adapters: --lora RANK, or --init-adapter DIR");
  return std::nullopt;
}

nn::CausalModel& prepare(nn::CausalModel& model, const TrainPlan& plan) {
  if (plan.lora) nn::add_lora(model, *plan.lora);
  model.set_dtype(plan.precision.compute);
  if (plan.options.checkpoint_activations) nn::checkpoint_activations(model);
  return model;
}

void load_values(const TrainPlan& plan, fsdp::Engine& engine, fsdp::GradientScaler* scaler) {
  if (!plan.checkpoint.empty()) {
    fsdp::Checkpoint checkpoint(plan.checkpoint);
    fsdp::restore(engine, checkpoint);
    if (scaler != nullptr) restore_scaler(checkpoint, *scaler);
    return;
  }
  engine.initialize(plan.options.seed);
  const auto fill_from = [&](const auto& folder, bool adapters) {
    folder.check(tensors_of(engine.model(), adapters));
    engine.fill([&](const nn::Parameter& parameter, nn::ElementRange range,
                    float* out) { folder.read(parameter.name(), range, out); },
                [&](const nn::Parameter& parameter) { return nn::is_adapter(parameter.name()) == adapters; });
  };
  if (!plan.options.init.empty()) fill_from(nn::HfFolder(plan.options.init), false);
  if (!plan.options.init_adapter.empty()) fill_from(nn::AdapterFolder(plan.options.init_adapter), true);
}

namespace {

struct Writers {
  std::optional<nn::HfFolderWriter> model;
  std::optional<nn::AdapterFolderWriter> adapter;
  std::optional<nn::AdapterMerge> merge;

  /// Parameters come in byte order of their names: a layer's lora_A and lora_B before its weight.
  void write(const nn::Parameter& parameter, std::span<const float> values) {
    const std::string& name = parameter.name();
    const nn::ElementRange all{0, parameter.count()};
    if (nn::is_adapter(name)) {
      if (merge) merge->add(name, parameter.shape(), values.data());
      if (adapter) adapter->write(name, all, values.data());
      return;
    }
    if (!model) return;
    if (!merge) return model->write(name, all, values.data());
    std::vector<float> merged(values.begin(), values.end());
    merge->merge(name, all, merged.data());
    model->write(name, all, merged.data());
  }
};

}  // namespace

void export_folders(const TrainPlan& plan, fsdp::Engine& engine, int rank) {
  const TrainOptions& o = plan.options;
  if (o.export_dir.empty() && o.export_adapter.empty()) return;
  Writers writers;
  if (rank == 0) {
    if (!o.export_dir.empty()) {
      writers.model.emplace(o.export_dir, plan.model, tensors_of(engine.model(), false));
      if (plan.lora) writers.merge.emplace(plan.model, *plan.lora);
    }
    if (!o.export_adapter.empty())
      writers.adapter.emplace(o.export_adapter, lora_json_of(plan), plan.model, tensors_of(engine.model(), true));
  }
  engine.visit(
      [&](const nn::Parameter& parameter, std::span<const float> values) { writers.write(parameter, values); });
  if (writers.model) writers.model->commit();
  if (writers.adapter) writers.adapter->commit();
}

std::string lora_json_of(const TrainPlan& plan) {
  return nn::lora_json(*plan.lora, plan.model, plan.options.init.empty() ? plan.options.model : plan.options.init);
}

}  // namespace tessera::tools
