#include "tools/train/model_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "tessera/base/error.h"
#include "tessera/fsdp/nn_model.h"
#include "tessera/fsdp/wrap.h"
#include "tessera/nn/hf_checkpoint.h"
#include "tessera/nn/host_access.h"
#include "tessera/nn/layers/linear.h"
#include "tessera/nn/nf4.h"
#include "tessera/nn/peft_adapter.h"
#include "tools/cli/output.h"
#include "tools/results/statistics.h"
#include "tools/train/run_checkpointer.h"

namespace tessera::tools {

using base::InvalidUsage;

namespace {

std::vector<nn::SafetensorsTensor> adapter_tensors(const nn::Module& model) {
  std::vector<nn::SafetensorsTensor> tensors;
  for (const auto& parameter : model.parameters())
    if (nn::is_adapter(parameter->name())) tensors.push_back({parameter->name(), parameter->shape()});
  return tensors;
}

/// Encodes whole tensors of a directory, one at a time, for callers that read parts of them.
class Encoder {
 public:
  Encoder(const nn::HfCheckpointReader& directory, const nn::ModelConfig& config) : directory_(directory) {
    for (const nn::SafetensorsTensor& tensor : dense_tensors(config)) counts_[tensor.name] = nn::count_of(tensor.shape);
  }
  /// Reads bytes `range` of the tensor's encoding, as numbers.
  void read(const std::string& name, nn::ElementRange range, float* out) {
    if (name != name_) {
      std::vector<float> values(static_cast<std::size_t>(counts_.at(name)));
      directory_.read(name, {0, counts_.at(name)}, values.data());
      bytes_.resize(nn::nf4_bytes(counts_.at(name)));
      nn::encode_nf4(values, bytes_);
      name_ = name;
    }
    for (std::int64_t i = range.begin; i < range.end; ++i)
      out[i - range.begin] = std::to_integer<std::uint8_t>(bytes_[static_cast<std::size_t>(i)]);
  }

 private:
  const nn::HfCheckpointReader& directory_;
  std::map<std::string, std::int64_t> counts_;
  std::string name_;
  std::vector<std::byte> bytes_;
};

/// Throws InvalidUsage if f16 can't hold a value: it would be infinite, and every step would be skipped.
template <class Read>
void check_f16(const nn::Parameter& parameter, const std::string& directory, Read&& read) {
  constexpr float kLargest = 65504;
  constexpr std::int64_t kAtOnce = 1 << 16;
  std::vector<float> values(kAtOnce);
  for (std::int64_t begin = 0; begin < parameter.count(); begin += kAtOnce) {
    const nn::ElementRange range{begin, std::min(begin + kAtOnce, parameter.count())};
    read(parameter.name(), range, values.data());
    for (std::int64_t i = 0; i < range.count(); ++i)
      if (!(std::abs(values[static_cast<std::size_t>(i)]) <= kLargest))
        throw InvalidUsage(
            fmt::format("{}: '{}' has the value {}, which f16 can't hold (at most {}); use --precision bf16, "
                        "or leave its module in f32 by --f32-modules",
                        directory, parameter.name(), unsigned_nan(values[static_cast<std::size_t>(i)]), kLargest));
  }
}

/// Checks the command line against adapters whose rank, alpha and targets are in `origin`.
void check_given(const TrainOptions& o, const std::optional<nn::LoraOptions>& there, const std::string& origin) {
  const auto refuse = [&](const std::string& option, const std::string& given, const std::string& is) {
    throw InvalidUsage(fmt::format("{} {} differs from {}, which has {}; leave it out", option, given, origin, is));
  };
  if (!there) {
    if (o.lora) refuse("--lora", std::to_string(*o.lora), "no adapters");
    return;
  }
  if (o.lora && *o.lora != there->rank) refuse("--lora", std::to_string(*o.lora), std::to_string(there->rank));
  if (o.lora_alpha && *o.lora_alpha != there->alpha)
    refuse("--lora-alpha", fmt::format("{}", *o.lora_alpha), fmt::format("{}", there->alpha));
  std::vector<std::string> targets = o.lora_targets;
  std::ranges::sort(targets);
  if (!targets.empty() && targets != there->targets)
    refuse("--lora-targets", joined_by(targets, ","), joined_by(there->targets, ","));
}

struct Writers {
  std::optional<nn::HfCheckpointWriter> model;
  std::optional<nn::PeftAdapterWriter> adapter;
  std::optional<nn::LoraMerger> merge;
  std::map<std::string, nn::Shape> shapes;  // of the model's directory

  /// Parameters come in byte order of their names: a layer's lora_A and lora_B before its weight.
  void write(const fsdp::Parameter& parameter, std::span<const float> values) {
    const std::string& name = parameter.name();
    if (nn::is_adapter(name)) {
      const nn::ElementRange all{0, parameter.count()};
      if (merge) merge->add(name, parameter.shape(), values);
      if (adapter) adapter->write(name, all, values.data());
      return;
    }
    if (!model) return;
    const nn::ElementRange all{0, nn::count_of(shapes.at(name))};
    if (!merge) return model->write(name, all, values.data());
    std::vector<float> merged(static_cast<std::size_t>(all.end));
    if (parameter.dtype() == base::DType::u8) {
      decode_numbers(values, shapes.at(name), all, merged.data());
    } else {
      std::copy(values.begin(), values.end(), merged.begin());
    }
    merge->merge(name, all, merged.data());
    model->write(name, all, merged.data());
  }
};

/// An attribute of the checkpoint; nothing if it has none of this name.
std::optional<std::string> attribute_in(const std::string& directory, const char* name) {
  const fsdp::Checkpoint checkpoint(directory);
  const auto found = checkpoint.attributes().find(name);
  return found == checkpoint.attributes().end() ? std::nullopt : std::optional(found->second);
}

}  // namespace

std::optional<nn::LoraOptions> lora_in(const std::string& directory) {
  const std::optional<std::string> text = attribute_in(directory, kLoraAttribute);
  return text ? std::optional(nn::parse_lora(*text, directory)) : std::nullopt;
}

std::optional<nn::LoraOptions> lora_of(const TrainOptions& o, const std::string& checkpoint,
                                       const nn::ModelConfig& model) {
  std::optional<nn::LoraOptions> lora;
  if (!o.init_adapter.empty()) {
    if (o.init.empty()) throw InvalidUsage("--init-adapter needs --init, the model that the adapter belongs to");
    lora = nn::PeftAdapterReader(o.init_adapter).options();
    check_given(o, lora, "--init-adapter " + o.init_adapter);
  } else if (!checkpoint.empty()) {
    lora = lora_in(checkpoint);
    check_given(o, lora, "--resume " + o.resume);
  } else if (o.lora) {
    lora = {.rank = *o.lora, .alpha = o.lora_alpha.value_or(8), .targets = o.lora_targets};
    if (lora->targets.empty()) lora->targets = nn::default_lora_targets(model);
    std::ranges::sort(lora->targets);
  }
  if (lora) return lora;
  for (const auto& [given, name] : {std::pair(o.lora_alpha.has_value(), "--lora-alpha"),
                                    {!o.lora_targets.empty(), "--lora-targets"},
                                    {!o.export_adapter.empty(), "--export-adapter"}})
    if (given) throw InvalidUsage(std::string(name) + " needs adapters: --lora RANK, or --init-adapter DIR");
  return std::nullopt;
}

std::vector<nn::SafetensorsTensor> dense_tensors(const nn::ModelConfig& config) {
  nn::Context context;
  return nn::saved_tensors(*nn::make_model(context, config));
}

void check_saved(const fsdp::Checkpoint& checkpoint, const nn::ModelConfig& config) {
  nn::Context context;
  const auto model = nn::make_model(context, config);
  if (quantized_in(checkpoint.directory())) nn::quantize_nf4(*model);
  if (const auto lora = lora_in(checkpoint.directory())) nn::add_lora(*model, *lora);
  fsdp::compare(fsdp::NnModel(*model).root(), checkpoint, {.optional_buffers = nn::is_fp8_state});
}

void check_sources(fsdp::TrainingTask& task, const TrainPlan& plan) {
  const TrainOptions& o = plan.options;
  if (!plan.checkpoint.empty())
    fsdp::compare(task.model().root(), fsdp::Checkpoint(plan.checkpoint), {.optional_buffers = nn::is_fp8_state});
  if (!o.init.empty()) nn::HfCheckpointReader(o.init).check(dense_tensors(plan.model));
  if (!o.init_adapter.empty())
    nn::PeftAdapterReader(o.init_adapter).check(adapter_tensors(fsdp::nn_module(task.model().root())));
}

void decode_numbers(std::span<const float> numbers, const nn::Shape& shape, nn::ElementRange range, float* out) {
  std::vector<std::byte> bytes(numbers.size());
  std::transform(numbers.begin(), numbers.end(), bytes.begin(),
                 [](float number) { return static_cast<std::byte>(static_cast<std::uint8_t>(number)); });
  nn::decode_nf4(bytes, nn::count_of(shape), range, out);
}

bool quantized_in(const std::string& directory) {
  const std::optional<std::string> format = attribute_in(directory, kQuantizeAttribute);
  if (format && *format != kNf4)
    throw InvalidUsage(directory + ": unknown weight format '" + *format + "'; known: nf4");
  return format.has_value();
}

bool quantized_of(const TrainOptions& o, const std::string& checkpoint, bool adapters) {
  const bool quantized = checkpoint.empty() ? !o.quantize.empty() : quantized_in(checkpoint);
  if (!quantized && !o.quantize.empty())
    throw InvalidUsage("--quantize differs from --resume " + o.resume + ", which is not quantized; leave it out");
  if (!quantized) return false;
  if (checkpoint.empty() && o.init.empty() && !o.simulated)
    throw InvalidUsage("--quantize needs --init, the model whose weights are quantized");
  if (!adapters) throw InvalidUsage("--quantize: weights in 4 bits can't be trained; train adapters with --lora RANK");
  return true;
}

void set_dtypes(nn::Module& model, base::DType dtype, const std::vector<std::string>& f32_modules) {
  if (!f32_modules.empty() && dtype == base::DType::f32)
    throw InvalidUsage("--f32-modules needs --precision bf16, f16 or fp8; the whole model is f32");
  model.set_dtype(dtype);
  fsdp::NnModel adapted(model);
  for (const std::string& item : f32_modules)
    for (fsdp::Module* module : fsdp::modules_named(adapted.root(), item, "--f32-modules"))
      fsdp::nn_module(*module).set_dtype(base::DType::f32);
  model.validate_dtypes();
}

void check_f16_values(fsdp::TrainingTask& task, const TrainPlan& plan) {
  const TrainOptions& o = plan.options;
  if (plan.precision.compute != base::DType::f16 || o.init.empty()) return;
  const nn::HfCheckpointReader directory(o.init);
  std::optional<nn::PeftAdapterReader> adapters;
  if (!o.init_adapter.empty()) adapters.emplace(o.init_adapter);
  for (const auto& parameter : fsdp::nn_module(task.model().root()).parameters()) {
    if (parameter->dtype() != base::DType::f16) continue;
    if (!nn::is_adapter(parameter->name()))
      check_f16(*parameter, o.init, [&](auto&&... place) { directory.read(place...); });
    else if (adapters)
      check_f16(*parameter, o.init_adapter, [&](auto&&... place) { adapters->read(place...); });
  }
}

void load_values(const TrainPlan& plan, fsdp::Engine& engine, fsdp::GradientScaler* scaler) {
  if (!plan.checkpoint.empty()) {
    fsdp::Checkpoint checkpoint(plan.checkpoint);
    const fsdp::RestoreReport report = fsdp::restore(engine, checkpoint, {.optional_buffers = nn::is_fp8_state});
    if (engine.mesh().rank() == 0 && !report.dropped.empty())
      print_clean(stderr, "tessera: --resume {}\n", report.dropped);
    if (engine.mesh().rank() == 0 && !report.missing.empty())
      print_clean(stderr, "tessera: --resume {}: has no history for --fp8-scaling delayed, which starts anew\n",
                  plan.checkpoint);
    if (scaler != nullptr) restore_scaler(checkpoint, *scaler);
    return;
  }
  engine.initialize(plan.options.seed);
  if (!plan.options.init.empty()) {
    const nn::HfCheckpointReader directory(plan.options.init);
    directory.check(dense_tensors(plan.model));
    Encoder encoder(directory, plan.model);
    engine.state().load(
        [&](const fsdp::Parameter& parameter, nn::ElementRange range, float* out) {
          if (parameter.dtype() == base::DType::u8) return encoder.read(parameter.name(), range, out);
          directory.read(parameter.name(), range, out);
        },
        [](const fsdp::Parameter& parameter) { return !nn::is_adapter(parameter.name()); });
    engine.state().load_buffers(
        [&](const fsdp::ModuleBuffer& buffer, void* out) {
          directory.read_whole(buffer.name(), buffer.dtype(), {static_cast<std::byte*>(out), buffer.bytes()});
        },
        [](const fsdp::ModuleBuffer& buffer) { return buffer.persistent() && !nn::is_fp8_state(buffer.name()); });
  }
  if (plan.options.init_adapter.empty()) return;
  const nn::PeftAdapterReader adapters(plan.options.init_adapter);
  adapters.check(adapter_tensors(fsdp::nn_module(engine.model().root())));
  engine.state().load([&](const fsdp::Parameter& parameter, nn::ElementRange range,
                          float* out) { adapters.read(parameter.name(), range, out); },
                      [](const fsdp::Parameter& parameter) { return nn::is_adapter(parameter.name()); });
}

void export_directories(const TrainPlan& plan, fsdp::Engine& engine, int rank) {
  const TrainOptions& o = plan.options;
  if (o.export_dir.empty() && o.export_adapter.empty()) return;
  Writers writers;
  if (rank == 0) {
    if (!o.export_dir.empty()) {
      const std::vector<nn::SafetensorsTensor> tensors = dense_tensors(plan.model);
      writers.model.emplace(o.export_dir, plan.model, tensors, origin_of(plan));
      for (const nn::SafetensorsTensor& tensor : tensors) writers.shapes[tensor.name] = tensor.shape;
      if (plan.lora) writers.merge.emplace(plan.model, *plan.lora);
    }
    if (!o.export_adapter.empty())
      writers.adapter.emplace(o.export_adapter, lora_json_of(plan), plan.model,
                              adapter_tensors(fsdp::nn_module(engine.model().root())));
  }
  engine.state().for_each_parameter(
      [&](const fsdp::Parameter& parameter, std::span<const float> values) { writers.write(parameter, values); });
  if (writers.model) {
    for (const auto& buffer : engine.state().buffers())
      if (buffer->persistent() && !nn::is_fp8_state(buffer->name()))
        engine.model().runtime().download(buffer->data(), buffer->bytes(), [&](const void* values) {
          writers.model->write_whole(buffer->name(), {static_cast<const std::byte*>(values), buffer->bytes()});
        });
    writers.model->commit();
  }
  if (writers.adapter) writers.adapter->commit();
}

std::string lora_json_of(const TrainPlan& plan) {
  const std::string origin = plan.options.init.empty() ? origin_of(plan) : plan.options.init;
  return nn::lora_json(*plan.lora, plan.model, origin.empty() ? plan.options.model : origin);
}

std::string origin_in(const std::string& directory) { return attribute_in(directory, kOriginAttribute).value_or(""); }

std::string origin_of(const TrainPlan& plan) {
  if (plan.options.init.empty()) return plan.checkpoint.empty() ? "" : origin_in(plan.checkpoint);
  return std::filesystem::absolute(plan.options.init).lexically_normal().string();
}

}  // namespace tessera::tools
