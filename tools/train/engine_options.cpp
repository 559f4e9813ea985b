// The engine's options for one strategy of a plan.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <span>

#include "tessera/base/checksum.h"
#include "tessera/base/error.h"
#include "tools/cli/output.h"
#include "tools/train/model_files.h"
#include "tools/train/model_task.h"

namespace tessera::tools {

using base::InvalidUsage;

namespace {

void set_reshard_after_forward(fsdp::EngineOptions& engine, const std::string& value) {
  if (value.empty()) return;
  if (value == "true" || value == "false") {
    engine.reshard_after_forward = value == "true";
    return;
  }
  const int shards = engine.mesh->size_of(fsdp::kShardAxis);
  engine.reshard_group_size = std::stoi(value);
  if (shards % engine.reshard_group_size != 0)
    throw InvalidUsage(fmt::format("--reshard-after-forward {}: must divide the {} shards of --strategy {}", value,
                                   shards, engine.strategy.name));
}

/// The size of a sequence of tokens or bytes, and a hash of parts of it.
std::string sample_of(const nn::TokenDataset& data) {
  constexpr std::int64_t kParts = 64, kLength = 1024;
  std::vector<std::int32_t> part(static_cast<std::size_t>(std::min(kLength, data.size())));
  base::RunningChecksum sum;
  for (std::int64_t i = 0; i < kParts; ++i) {
    const auto length = static_cast<std::int64_t>(part.size());
    data.read((data.size() - length) * i / (kParts - 1), length, part.data());
    sum.add(std::as_bytes(std::span(part)));
  }
  return fmt::format("{} tokens, sampled hash {:016x}", data.size(), sum.value());
}

std::string sample_of(const std::shared_ptr<const nn::TokenDataset>& data) { return data ? sample_of(*data) : "none"; }

/// A sample of the weights in a directory.
std::string sample_of(const std::string& directory) {
  std::vector<std::string> files;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(directory, ignored))
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  std::ranges::sort(files);
  return files.empty() ? "none" : sample_of(nn::TokenDataset(files, nn::TokenFormat::any, 256));
}

}  // namespace

std::vector<comm::SharedSetting> shared_settings_of(const TrainPlan& plan) {
  const TrainOptions& o = plan.options;
  const auto given = [](const auto& option) { return std::string(option ? "given" : "not given"); };
  const std::string config = plan.task ? o.model.substr(o.model.rfind('/') + 1) : nn::config_json(plan.model);
  std::vector<comm::SharedSetting> all = {
      {"--model", fmt::format("{} parameters, configuration {:016x}", plan.parameters,
                              base::checksum(std::as_bytes(std::span(config))))},
      {"--lora", plan.lora ? lora_json_of(plan) : "none"},
      {"--init", sample_of(o.init)},
      {"--init-adapter", sample_of(o.init_adapter)},
      {"--resume", plan.checkpoint.empty() ? "none" : fmt::format("step {}", plan.first_step)},
      {"--precision", o.precision},  // fp8 has bf16's parameters, which the engine compares
      {"--fp8-scaling", o.fp8_scaling},
      {"--f32-modules", joined_by(o.f32_modules, ",")},
      {"--quantize", plan.quantized ? kNf4 : "none"},
      {"--checkpoint-activations", given(o.checkpoint_activations)},
      {"--recompute", joined_by(o.recompute, ",")},
      {"--data", sample_of(plan.data)},
      {"--eval", sample_of(plan.eval)},
      {"--global-batch", std::to_string(o.global_batch)},
      {"--seq-len", std::to_string(plan.seq_len)},
      {"--accumulate", std::to_string(o.accumulate)},
      {"--lr", fmt::format("{}", o.lr)},
      {"--schedule", o.schedule},
      {"--warmup", std::to_string(o.warmup)},
      {"--steps", std::to_string(o.steps)},
      {"--seed", std::to_string(o.seed)},
      {"--save", given(!o.save.empty())},
      {"--save-every", fmt::format("{}", o.save_every.value_or(0))},
      {"--export", given(!o.export_dir.empty())},
      {"--export-adapter", given(!o.export_adapter.empty())},
      {"--trace", given(!o.trace.empty())},
      {"--report", given(!o.report.empty())},
      {"--graphs", std::to_string(static_cast<int>(plan.graphs))},
      {"--device", o.device.substr(0, o.device.find(':'))},
      {"--link", o.link},
      {"--link-intra", o.link_intra},
      {"--hosts", std::to_string(o.hosts)},
  };
  all.insert(all.end(), plan.command.begin(), plan.command.end());
  return all;
}

fsdp::StepShape step_shape_of(const StepOptions& o) {
  return {.prefetch = o.prefetch,
          .microbatches = static_cast<int>(o.accumulate),
          .reshard_after_backward = o.reshard_after_backward != "false"};
}

int parts_over(const fsdp::Axes& axes, const fsdp::MeshShape& mesh) {
  int parts = 1;
  for (const fsdp::MeshAxis& axis : mesh.axes)
    if (axes.count(axis.name) > 0) parts *= axis.size;
  return parts;
}

int sync_period(const fsdp::Strategy& strategy) {
  const fsdp::Axis axis = fsdp::periodic_axis(strategy);
  return axis.empty() ? 1 : strategy.sync.at(axis).period;
}

fsdp::EngineOptions engine_options(const TrainPlan& plan, const std::string& strategy) {
  fsdp::EngineOptions engine;
  std::string text = strategy;
  for (const std::string& plugin : plan.options.collectives) text += "+" + plugin;
  engine.strategy = fsdp::parse_strategy(text, engine.collectives);
  if (!fsdp::periodic_axis(engine.strategy).empty())
    engine.strategy = fsdp::with_period(std::move(engine.strategy), plan.options.period);
  if (!plan.options.reduce_when.empty())
    engine.strategy =
        fsdp::with_accumulation(std::move(engine.strategy), fsdp::parse_accumulation(plan.options.reduce_when));
  engine.mesh = engine.strategy.two_axes && !plan.options.mesh.empty()
                    ? fsdp::parse_mesh(plan.options.mesh)
                    : fsdp::default_mesh(engine.strategy, plan.ranks, plan.ranks_per_host);
  if (engine.mesh->size() != plan.ranks)
    throw InvalidUsage("--mesh " + plan.options.mesh + " has " + std::to_string(engine.mesh->size()) +
                       " positions for " + std::to_string(plan.ranks) + " ranks; replicas x shards must equal --ranks");
  fsdp::validate(engine.strategy, *engine.mesh);
  fsdp::validate_collectives(engine.strategy, *engine.mesh, plan.precision, engine.collectives);
  if (!plan.options.f32_modules.empty())
    fsdp::validate_collectives(engine.strategy, *engine.mesh, {}, engine.collectives);
  engine.wrap = plan.options.wrap;
  engine.prefetch = plan.options.prefetch;
  engine.backward_prefetch =
      plan.options.backward_prefetch == "post" ? fsdp::BackwardPrefetch::post : fsdp::BackwardPrefetch::pre;
  engine.limit_all_gathers = plan.options.limit_all_gathers;
  set_reshard_after_forward(engine, plan.options.reshard_after_forward);
  engine.cpu_offload = plan.options.cpu_offload;
  if (engine.cpu_offload) fsdp::require_offloadable(engine.strategy);
  engine.optimizer = plan.options.optimizer_config;
  engine.reshard_after_backward = plan.options.reshard_after_backward != "false";
  engine.clip_norm = plan.options.clip_norm;
  engine.norm = norm_of(plan.options);
  engine.use_loss_scaling = plan.precision.compute == base::DType::f16;
  if (plan.precision.casts()) engine.reduce_dtype = plan.precision.reduce;
  refuse_scaled_replicas(engine.strategy, plan.precision);
  if (plan.fp8 == nn::Fp8Scaling::delayed) {
    if (!fsdp::periodic_axis(engine.strategy).empty())
      throw InvalidUsage("--fp8-scaling delayed: under strategy " + engine.strategy.name +
                         " replicas would scale by different histories; use --fp8-scaling current");
    engine.buffers = fsdp::BufferSync::maximum;
  }
  return engine;
}

std::vector<std::string> strategies_of(const TrainPlan& plan, std::vector<std::string>& left_out) {
  std::vector<std::string> names;
  for (const std::string& asked : plan.options.strategies) {
    engine_options(plan, asked);
    names.push_back(fsdp::parse_strategy(asked, fsdp::CollectiveRegistry::built_in()).name);
    if (std::ranges::count(names, names.back()) > 1)
      throw InvalidUsage("--strategies: " + names.back() + " is given twice; once is enough");
  }
  if (!names.empty()) return names;
  for (const char* name : kDefaultStrategies) {
    try {
      engine_options(plan, name);
      names.emplace_back(name);
    } catch (const InvalidUsage& error) {
      left_out.emplace_back(error.what());
    }
  }
  if (names.empty()) throw InvalidUsage(left_out.back());
  return names;
}

std::string accumulation_note(const TrainPlan& plan, const std::string& strategy) {
  if (plan.options.accumulate == 1) return "";
  const fsdp::EngineOptions options = engine_options(plan, strategy);
  nn::Context context;
  const auto task = make_task(plan, context);
  const auto units = fsdp::planned_units(task->model().root(), options.wrap, options.strategy, *options.mesh,
                                         options.reshard_after_forward);
  std::string note =
      fmt::format("{} microbatches a step under {}, per rank:", plan.options.accumulate, options.strategy.name);
  for (const char* accumulation : {"every", "last", "scatter"}) {
    const fsdp::Strategy reduced = fsdp::with_accumulation(options.strategy, fsdp::parse_accumulation(accumulation));
    const fsdp::StepShape shape = step_shape_of(plan.options);
    const auto sent =
        fsdp::communication_formula(reduced, *options.mesh, units, plan.precision, shape, options.collectives).bytes;
    const auto peak = fsdp::peak_formula(reduced, *options.mesh, units, shape, plan.precision);
    note += fmt::format("{} --reduce-when {} sends {} and holds {} of full gradients",
                        accumulation == std::string("every") ? "" : ";", accumulation,
                        human_bytes(sent.all_gather + sent.reduce_scatter + sent.all_reduce),
                        human_bytes(peak.unsharded_gradient));
  }
  return note;
}

}  // namespace tessera::tools
