#include "tools/train/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/fsdp/collective_plugin.h"
#include "tessera/nn/lora.h"
#include "tools/cli/machine.h"
#include "tools/cli/output.h"
#include "tools/cli/validators.h"

namespace tessera::tools {

using base::InvalidUsage;

namespace {

constexpr std::uint64_t kMax = 1ULL << 40;

void add_model_options(CLI::App& command, ModelOptions& o) {
  add_option(command, "--model", o.model,
             "model preset (tessera info --models), or Hugging Face config.json (gpt2, llama, mistral, qwen2) or "
             "its folder, or your own as FILE.so:NAME,OPTION=VALUE",
             "NAME|FILE")
      ->each([&o](const std::string&) { o.model_given = true; });
  add_option(command, "--lora", o.lora,
             "train LoRA adapters of this rank and freeze the weights of the model; see --init",
             {"RANK", whole_number(1, static_cast<std::uint64_t>(nn::kMaxLoraRank))});
  add_option(command, "--lora-alpha", o.lora_alpha, "scale adapters by alpha / rank (default: 8)",
             finite_number(std::numeric_limits<double>::min()));
  add_option(command, "--lora-targets", o.lora_targets,
             "linear layers with adapters, by the end of their names (default: c_attn, or q_proj and v_proj)",
             list_of());
  add_option(command, "--quantize", o.quantize,
             "keep the frozen linear weights in 4 bits (QLoRA), at rest and unsharded; needs --lora", one_of({"nf4"}));
}

void add_batch_options(CLI::App& command, BatchOptions& o) {
  add_option(command, "--global-batch", o.global_batch,
             "sequences per optimizer step over all ranks and microbatches (default: 12, or the next number that "
             "they divide)",
             whole_number(1, kMax))
      ->each([&o](const std::string&) { o.batch_given = true; });
  add_option(command, "--seq-len", o.seq_len, "tokens per sequence (default: the model's context, at most 256)",
             whole_number(1, kMax));
}

void add_precision_options(CLI::App& command, ModelOptions& o) {
  add_option(command, "--precision", o.precision,
             "dtype of parameters, activations and gradients; bf16 and f16 have f32 master weights; fp8: bf16, with "
             "the products of linear layers in 8-bit floating point",
             one_of({"f32", "bf16", "f16", "fp8"}));
  add_option(command, "--fp8-scaling", o.fp8_scaling,
             "scales of --precision fp8: from each tensor itself (current, default), from the steps before "
             "(delayed), or 1 (none, which shows what a scale is for)",
             one_of({"current", "delayed", "none"}));
  add_option(command, "--f32-modules", o.f32_modules,
             "modules that stay in f32 with --precision bf16, f16 or fp8, by path or type:CLASS (type:RMSNorm,lm_head)",
             list_of("LIST"));
  add_option(command, "--reduce-dtype", o.reduce_dtype,
             "dtype in which gradients are reduced and kept: f32, or as --precision (default; fp8: bf16)",
             one_of({"f32", "bf16", "f16"}));
}

void add_accumulation_options(CLI::App& command, BatchOptions& o) {
  add_option(command, "--accumulate", o.accumulate, "microbatches per optimizer step (gradient accumulation)",
             whole_number(1, kMax));
  add_option(command, "--reduce-when", o.reduce_when,
             "when --accumulate reduces gradients: every: in each microbatch (default); last: in the last one; "
             "scatter: reduce-scatter in each, all-reduce over replicas in the last",
             one_of({"every", "last", "scatter"}));
}

/// Those that its memory depends on, and the norm.
void add_optimizer_options(CLI::App& command, OptimizerOptions& o) {
  nn::OptimizerConfig& c = o.optimizer_config;
  add_option(command, "--norm-type", o.norm_type, "norm of the gradients that is shown and that --clip-norm uses",
             one_of({"1", "2", "3", "inf"}));
  add_option(command, "--clip-norm", o.clip_norm, "clip gradients to this norm over all parameters (0: off)",
             finite_number(0));
  add_option(command, "--optimizer", o.optimizer, "optimizer of the trainable parameters",
             one_of({"adamw", "adam", "sgd"}));
  add_option(command, "--momentum", c.momentum, "momentum of sgd", finite_number(0));
  command.add_flag("--nesterov", c.nesterov, "use Nesterov momentum in sgd");
  command.add_flag("--amsgrad", c.amsgrad, "use the largest second moment so far in adam and adamw");
}

void add_sharding_options(CLI::App& command, ShardingOptions& o) {
  add_option(command, "--mesh", o.mesh,
             "replicas x shards for hsdp (default: 2 x ranks/2 on one host, else hosts x ranks per host)", "RxS");
  add_option(command, "--collectives", o.collectives,
             "collective plug-ins of every strategy: PLUGIN (see tessera info), COLLECTIVE=PLUGIN or FILE.so:NAME",
             list_of("[COLLECTIVE=]PLUGIN"));
  add_option(command, "--sync-every", o.period.steps, "sync period of diloco and local_sgd in steps (default: 10)",
             whole_number(1, 1 << 30));
  add_option(command, "--outer-lr", o.period.outer_learning_rate,
             "learning rate of the outer optimizer (default: diloco 0.7, local_sgd 1)", finite_number(0));
  add_option(command, "--outer-momentum", o.period.outer_momentum,
             "Nesterov momentum of the outer optimizer (default: diloco 0.9, local_sgd 0)", finite_number(0));
  add_option(command, "--wrap", o.wrap,
             "modules that form units (see tessera info --units): none, block, size:N, type:CLASS, or a list such "
             "as \"block;wte;ln_f\"");
  add_option(command, "--prefetch", o.prefetch, "units to unshard ahead of the one that computes",
             whole_number(0, 1024));
  add_option(command, "--backward-prefetch", o.backward_prefetch,
             "when backward unshards the next unit: before computing the current one (pre) or after (post)",
             one_of({"pre", "post"}));
  add_option(command, "--limit-all-gathers", o.limit_all_gathers,
             "most units unsharded at once, including the computing one, without the root (0: no limit)",
             whole_number(0, 1024));
  add_option(command, "--reshard-after-forward", o.reshard_after_forward,
             "units to reshard after forward: true: all but the root; false: none; K: to shards over K neighbor "
             "ranks (default: all but the root and the last unit)",
             "true|false|K")
      ->check([](const std::string& value) {
        int ranks = 0;
        const auto end = value.data() + value.size();
        const auto [stop, error] = std::from_chars(value.data(), end, ranks);
        const bool number = error == std::errc() && stop == end && ranks >= 1;
        return value == "true" || value == "false" || number ? "" : "true, false or a number of ranks, not " + value;
      });
  add_option(command, "--reshard-after-backward", o.reshard_after_backward,
             "false: keep parameters unsharded between the microbatches of --accumulate", one_of({"true", "false"}));
}

void add_recompute_options(CLI::App& command, ModelOptions& o) {
  command.add_flag("--checkpoint-activations", o.checkpoint_activations,
                   "recompute activations of blocks in backward: less memory, a third more work, bitwise equal");
  add_option(command, "--recompute", o.recompute,
             "outputs that backward computes again instead of keeping them, bitwise equal on the host: activation "
             "(GELU, SwiGLU), norm, or both",
             list_of("LIST", one_of({"activation", "norm"})));
}

void add_loop_options(CLI::App& command, TrainOptions& o) {
  add_option(command, "--steps", o.steps, "optimizer steps in total, also when resuming", whole_number(0, kMax));
  add_option(command, "--lr", o.lr, "peak learning rate of the schedule", finite_number());
  add_option(command, "--schedule", o.schedule, "learning rate after the warm-up", one_of({"constant", "cosine"}));
  add_option(command, "--warmup", o.warmup, "steps of linear warm-up", whole_number(0, kMax));
  add_option(command, "--seed", o.seed, "seed of initial values, batch order and dropout",
             whole_number(0, std::numeric_limits<std::uint64_t>::max()));
}

void add_optimizer_settings(CLI::App& command, OptimizerOptions& o) {
  nn::OptimizerConfig& c = o.optimizer_config;
  add_option(command, "--betas", o.betas, "decay rates of adam's moments (default: 0.9,0.999)",
             list_of("A,B", finite_number(0)))
      ->expected(2);
  add_option(command, "--eps", c.eps, "epsilon in adam's denominator", finite_number(0));
  add_option(command, "--weight-decay", c.weight_decay,
             "weight decay, except for norms and biases (default: 0.01 for adamw, else 0)", finite_number(0));
  command.add_flag("--maximize", c.maximize, "maximize the loss instead of minimizing it");
}

}  // namespace

void add_step_options(CLI::App& command, StepOptions& o) {
  add_model_options(command, o);
  add_batch_options(command, o);
  add_precision_options(command, o);
  add_accumulation_options(command, o);
  add_optimizer_options(command, o);
  add_sharding_options(command, o);
  add_recompute_options(command, o);
  command.add_flag("--cpu-offload", o.cpu_offload,
                   "keep sharded state in pinned host memory; copy it to the device on demand");
}

void add_strategy_option(CLI::App& command, ShardingOptions& o) {
  add_option(command, "--strategy", o.strategy,
             fmt::format("sharding strategy: {}, PyTorch's name for one, or FILE.so:NAME of a plug-in",
                         joined_by(fsdp::strategy_names(), " ")));
}

void add_world_options(CLI::App& command, WorldOptions& world, BatchOptions& batch) {
  add_option(command, "--ranks", world.ranks, "number of ranks; under a launcher, its number (default: 4)",
             whole_number(1, 4096));
  add_option(command, "--backend", world.backend, "backend that connects the ranks; overrides TESSERA_BACKEND")
      ->each([&world](const std::string&) { world.backend_given = true; });
  add_option(command, "--data", batch.data,
             "text or token files to train on (default: the corpus of scripts/setup); training never reads their last "
             "tenth, which is left for --eval",
             list_of("FILE[,FILE]"));
  add_option(command, "--data-format", batch.data_format,
             "format of --data: bytes of text, or headerless token ids of 16 or 32 bits",
             one_of({"bytes", "u16", "u32"}));
  add_option(command, "--threads", world.threads,
             "compute threads per rank; ranks are bound to cores if each thread has one (default: cores / ranks)",
             whole_number(1, 1024));
}

void add_train_options(CLI::App& command, TrainOptions& o) {
  add_step_options(command, o);
  add_world_options(command, o, o);
  add_device_option(command, o.device);
  // As a variable, an optional<bool> would be false without the flag.
  command.add_flag_function(
      "--graphs,!--no-graphs", [&o](std::int64_t given) { o.graphs = given > 0; },
      "replay forward and backward as one captured device graph (default: where a step allows it: one "
      "rank on CUDA, without what changes from step to step)");
  add_option(command, "--init", o.init, "start from the model and weights of a Hugging Face directory", "DIR");
  add_option(command, "--init-adapter", o.init_adapter, "start from the adapters of a PEFT directory; needs --init",
             "DIR");
  add_loop_options(command, o);
  add_link_options(command, o);
  add_optimizer_settings(command, o);
  add_option(command, "--eval", o.eval, "print the mean loss over this file after training", "FILE");
  add_option(command, "--json", o.json, "write the results as JSON", "FILE");
  add_option(command, "--peak-flops", o.peak_flops,
             "peak of a rank's device, such as 312TFLOP/s, for the MFU (default: known for H100, H200 and A100)",
             "FLOPS");
  add_option(command, "--flight-recorder", o.flight_recorder,
             "record the last calls of each rank in this directory, for report --postmortem after a failure", "DIR");
  add_option(command, "--trace", o.trace, "write the last step of every rank as a Chrome trace, which Perfetto opens",
             "FILE");
}

fsdp::Precision precision_of(const ModelOptions& o) {
  const std::string compute = o.precision == "fp8" ? "bf16" : o.precision;
  std::optional<base::DType> reduce;
  if (!o.reduce_dtype.empty()) reduce = base::parse_dtype(o.reduce_dtype);
  if (reduce && *reduce != base::DType::f32 && o.reduce_dtype != compute)
    throw InvalidUsage("--reduce-dtype " + o.reduce_dtype + " with --precision " + o.precision +
                       ": gradients are reduced in the type of --precision or in f32");
  return fsdp::make_precision(base::parse_dtype(compute), reduce);
}

std::optional<nn::Fp8Scaling> fp8_of(const ModelOptions& o) {
  if (o.precision == "fp8") {
    if (o.fp8_scaling == "none") return nn::Fp8Scaling::none;
    return o.fp8_scaling == "delayed" ? nn::Fp8Scaling::delayed : nn::Fp8Scaling::current;
  }
  if (!o.fp8_scaling.empty())
    throw InvalidUsage("--fp8-scaling needs --precision fp8; with " + o.precision + " nothing is scaled");
  return std::nullopt;
}

nn::RecomputedOutputs recomputed_of(const ModelOptions& o) {
  const auto has = [&](std::string_view name) { return std::ranges::find(o.recompute, name) != o.recompute.end(); };
  return {.activations = has("activation"), .norms = has("norm")};
}

nn::OptimizerConfig optimizer_of(const OptimizerOptions& o) {
  nn::OptimizerConfig optimizer = o.optimizer_config;
  optimizer.kind = nn::parse_optimizer(o.optimizer);
  optimizer.beta1 = o.betas.at(0);
  optimizer.beta2 = o.betas.at(1);
  base::validate(optimizer);
  return optimizer;
}

nn::LrSchedule schedule_of(const OptimizerOptions& o, std::int64_t steps) {
  if (!(o.lr > 0)) throw InvalidUsage("--lr " + std::to_string(o.lr) + ": a learning rate is above 0");
  nn::LrSchedule schedule{.kind = nn::parse_schedule(o.schedule), .peak = o.lr, .warmup = o.warmup, .steps = steps};
  if (steps > 0) nn::validate(schedule);
  return schedule;
}

nn::kernels::Norm norm_of(const OptimizerOptions& o) {
  const std::string& type = o.norm_type;
  if (type == "inf") return nn::kernels::Norm::infinity;
  return type == "1" ? nn::kernels::Norm::one : type == "3" ? nn::kernels::Norm::three : nn::kernels::Norm::two;
}

void check_period(const ShardingOptions& o) {
  if (!o.period.steps && !o.period.outer_learning_rate && !o.period.outer_momentum) return;
  std::vector<std::string> names = o.strategies;
  if (names.empty()) names.push_back(o.strategy);
  const fsdp::CollectiveRegistry registry = fsdp::CollectiveRegistry::built_in();
  for (const std::string& name : names)
    if (!fsdp::periodic_axis(fsdp::parse_strategy(name, registry)).empty()) return;
  throw InvalidUsage(
      "--sync-every, --outer-lr and --outer-momentum need a strategy with a sync period: diloco or local_sgd");
}

void refuse_scaled_replicas(const fsdp::Strategy& strategy, const fsdp::Precision& precision) {
  if (precision.compute == base::DType::f16 && !fsdp::periodic_axis(strategy).empty())
    throw InvalidUsage("--precision f16: under strategy " + strategy.name +
                       " replicas would skip different steps of a scaled loss; use bf16 or f32");
}

}  // namespace tessera::tools
