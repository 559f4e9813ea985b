#include "tools/train/options.h"

#include <charconv>

#include "tools/cli/machine.h"
#include "tools/cli/validators.h"
#include "tools/train/model_files.h"
#include "tools/train/run_checkpointer.h"

namespace tessera::tools {

namespace {

void add_run_options(CLI::App& command, TrainOptions& o) {
  add_device_option(command, o.device);
  // As a variable, an optional<bool> would be false without the flag.
  command.add_flag_function(
      "--graphs,!--no-graphs", [&o](std::int64_t given) { o.graphs = given > 0; },
      "replay forward and backward as one captured device graph (default: where a step allows it: one "
      "rank on CUDA, without what changes from step to step)");
  command.add_option("--init", o.init, "start from the model and weights of a Hugging Face directory")
      ->type_name("DIR");
  command.add_option("--init-adapter", o.init_adapter, "start from the adapters of a PEFT directory; needs --init")
      ->type_name("DIR");
}

void add_adapter_options(CLI::App& command, TrainOptions& o) {
  command
      .add_option("--lora", o.lora, "train LoRA adapters of this rank and freeze the weights of the model; see --init")
      ->type_name("RANK")
      ->transform(whole_number(1, static_cast<std::uint64_t>(nn::kMaxLoraRank)));
  command.add_option("--lora-alpha", o.lora_alpha, "scale adapters by alpha / rank (default: 8)")
      ->check(finite_number(std::numeric_limits<double>::min()));
  command
      .add_option("--lora-targets", o.lora_targets,
                  "linear layers with adapters, by the end of their names (default: c_attn, or q_proj and v_proj)")
      ->type_name("A,B")
      ->delimiter(',');
  command
      .add_option("--quantize", o.quantize,
                  "keep the frozen linear weights in 4 bits (QLoRA), at rest and gathered; needs --lora")
      ->check(CLI::IsMember({"nf4"}));
}

void add_loop_options(CLI::App& command, TrainOptions& o) {
  constexpr std::uint64_t kMax = 1ULL << 40;
  command.add_option("--steps", o.steps, "optimizer steps in total, also when resuming")
      ->transform(whole_number(0, kMax))
      ->capture_default_str();
  command.add_option("--lr", o.lr, "peak learning rate of the schedule")->check(finite_number())->capture_default_str();
  command.add_option("--schedule", o.schedule, "learning rate after the warm-up")
      ->check(CLI::IsMember({"constant", "cosine"}))
      ->capture_default_str();
  command.add_option("--warmup", o.warmup, "steps of linear warm-up")
      ->transform(whole_number(0, kMax))
      ->capture_default_str();
  command.add_option("--seed", o.seed, "seed of initial values, batch order and dropout")
      ->transform(whole_number(0, std::numeric_limits<std::uint64_t>::max()))
      ->capture_default_str();
}

void add_batch_options(CLI::App& command, TrainOptions& o) {
  constexpr std::uint64_t kMax = 1ULL << 40;
  command
      .add_option("--global-batch", o.global_batch,
                  "sequences per optimizer step over all ranks and microbatches (default: 12, or the next number that "
                  "they divide)")
      ->transform(whole_number(1, kMax))
      ->each([&o](const std::string&) { o.batch_given = true; });
  command.add_option("--seq-len", o.seq_len, "tokens per sequence (default: the model's context, at most 256)")
      ->transform(whole_number(1, kMax));
  command
      .add_option(
          "--precision", o.precision,
          "dtype of parameters, activations and gradients; bf16 and f16 have f32 master weights; fp8: bf16, with "
          "the products of linear layers in 8-bit floating point")
      ->check(CLI::IsMember({"f32", "bf16", "f16", "fp8"}))
      ->capture_default_str();
  command
      .add_option("--fp8-scaling", o.fp8_scaling,
                  "scales of --precision fp8: from each tensor itself (current, default), from the steps before "
                  "(delayed), or 1 (none, which shows what a scale is for)")
      ->check(CLI::IsMember({"current", "delayed", "none"}));
  command
      .add_option(
          "--f32-modules", o.f32_modules,
          "modules that stay in f32 with --precision bf16, f16 or fp8, by path or type:CLASS (type:RMSNorm,lm_head)")
      ->type_name("LIST")
      ->delimiter(',');
  command
      .add_option("--reduce-dtype", o.reduce_dtype,
                  "dtype in which gradients are reduced and kept: f32, or as --precision (default; fp8: bf16)")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  command.add_option("--accumulate", o.accumulate, "microbatches per optimizer step (gradient accumulation)")
      ->transform(whole_number(1, kMax))
      ->capture_default_str();
  command
      .add_option("--reduce-when", o.reduce_when,
                  "when --accumulate reduces gradients: every: in each microbatch (default); last: in the last one; "
                  "scatter: reduce-scatter in each, all-reduce over replicas in the last")
      ->check(CLI::IsMember({"every", "last", "scatter"}));
  command.add_option("--norm-type", o.norm_type, "norm of the gradients that is shown and that --clip-norm uses")
      ->check(CLI::IsMember({"1", "2", "3", "inf"}))
      ->capture_default_str();
  command.add_option("--clip-norm", o.clip_norm, "clip gradients to this norm over all parameters (0: off)")
      ->check(finite_number(0))
      ->capture_default_str();
}

void add_optimizer_options(CLI::App& command, TrainOptions& o) {
  nn::OptimizerConfig& c = o.optimizer_config;
  command.add_option("--optimizer", o.optimizer, "optimizer of the trainable parameters")
      ->check(CLI::IsMember({"adamw", "adam", "sgd"}))
      ->capture_default_str();
  command.add_option("--momentum", c.momentum, "momentum of sgd")->check(finite_number(0))->capture_default_str();
  command.add_flag("--nesterov", c.nesterov, "use Nesterov momentum in sgd");
  command.add_flag("--amsgrad", c.amsgrad, "use the largest second moment so far in adam and adamw");
}

void add_optimizer_settings(CLI::App& command, TrainOptions& o) {
  nn::OptimizerConfig& c = o.optimizer_config;
  command.add_option("--betas", o.betas, "decay rates of adam's moments (default: 0.9,0.999)")
      ->type_name("A,B")
      ->delimiter(',')
      ->expected(2)
      ->check(finite_number(0));
  command.add_option("--eps", c.eps, "epsilon in adam's denominator")->check(finite_number(0))->capture_default_str();
  command
      .add_option("--weight-decay", c.weight_decay,
                  "weight decay, except for norms and biases (default: 0.01 for adamw, else 0)")
      ->check(finite_number(0));
  command.add_flag("--maximize", c.maximize, "maximize the loss instead of minimizing it");
}

void add_sharding_options(CLI::App& command, TrainOptions& o) {
  command
      .add_option("--mesh", o.mesh,
                  "replicas x shards for hsdp (default: 2 x ranks/2 on one host, else hosts x ranks per host)")
      ->type_name("RxS");
  command
      .add_option("--collectives", o.collectives,
                  "collective plug-ins of every strategy: PLUGIN (see tessera info), COLLECTIVE=PLUGIN or FILE.so:NAME")
      ->type_name("[COLLECTIVE=]PLUGIN")
      ->delimiter(',');
  command.add_option("--sync-every", o.period.steps, "sync period of diloco and local_sgd in steps (default: 10)")
      ->transform(whole_number(1, 1 << 30));
  command
      .add_option("--outer-lr", o.period.outer_learning_rate,
                  "learning rate of the outer optimizer (default: diloco 0.7, local_sgd 1)")
      ->check(finite_number(0));
  command
      .add_option("--outer-momentum", o.period.outer_momentum,
                  "Nesterov momentum of the outer optimizer (default: diloco 0.9, local_sgd 0)")
      ->check(finite_number(0));
  command
      .add_option("--wrap", o.wrap,
                  "modules that form units (see tessera info --units): none, block, size:N, type:CLASS, or a list such "
                  "as \"block;wte;ln_f\"")
      ->capture_default_str();
  command.add_option("--prefetch", o.prefetch, "units to unshard ahead of the one that computes")
      ->transform(whole_number(0, 1024))
      ->capture_default_str();
  command
      .add_option("--backward-prefetch", o.backward_prefetch,
                  "when backward unshards the next unit: before computing the current one (pre) or after (post)")
      ->check(CLI::IsMember({"pre", "post"}))
      ->capture_default_str();
  command
      .add_option("--limit-all-gathers", o.limit_all_gathers,
                  "most units unsharded at once, including the computing one, without the root (0: no limit)")
      ->transform(whole_number(0, 1024))
      ->capture_default_str();
  command
      .add_option("--reshard-after-forward", o.reshard_after_forward,
                  "units to reshard after forward: true: all but the root; false: none; K: to shards over K neighbor "
                  "ranks (default: all but the root and the last unit)")
      ->type_name("true|false|K")
      ->check([](const std::string& value) {
        int ranks = 0;
        const auto end = value.data() + value.size();
        const auto [stop, error] = std::from_chars(value.data(), end, ranks);
        const bool number = error == std::errc() && stop == end && ranks >= 1;
        return value == "true" || value == "false" || number ? "" : "true, false or a number of ranks, not " + value;
      });
  command
      .add_option("--reshard-after-backward", o.reshard_after_backward,
                  "false: keep parameters unsharded between the microbatches of --accumulate")
      ->check(CLI::IsMember({"true", "false"}));
  command.add_flag("--checkpoint-activations", o.checkpoint_activations,
                   "recompute activations of blocks in backward: less memory, a third more work, bitwise equal");
  command
      .add_option("--recompute", o.recompute,
                  "outputs that backward computes again instead of keeping them, bitwise equal on the host: activation "
                  "(GELU, SwiGLU), norm, or both")
      ->type_name("LIST")
      ->delimiter(',')
      ->check(CLI::IsMember({"activation", "norm"}));
  command.add_flag("--cpu-offload", o.cpu_offload,
                   "keep sharded state in pinned host memory; copy it to the device on demand");
}

}  // namespace

void add_step_options(CLI::App& command, TrainOptions& o) {
  command
      .add_option("--model", o.model,
                  "model preset (tessera info --models), or Hugging Face config.json (gpt2, llama, mistral, qwen2) or "
                  "its folder")
      ->type_name("NAME|FILE")
      ->capture_default_str()
      ->each([&o](const std::string&) { o.model_given = true; });
  add_adapter_options(command, o);
  add_batch_options(command, o);
  add_optimizer_options(command, o);
  add_sharding_options(command, o);
}

void add_world_options(CLI::App& command, TrainOptions& o) {
  command.add_option("--ranks", o.ranks, "number of ranks; under a launcher, its number (default: 4)")
      ->transform(whole_number(1, 4096));
  command.add_option("--backend", o.backend, "backend that connects the ranks; overrides TESSERA_BACKEND")
      ->capture_default_str()
      ->each([&o](const std::string&) { o.backend_given = true; });
  command
      .add_option(
          "--data", o.data,
          "text or token files to train on (default: the corpus of scripts/setup); training never reads their last "
          "tenth, which is left for --eval")
      ->type_name("FILE[,FILE]")
      ->delimiter(',');
  command
      .add_option("--data-format", o.data_format,
                  "format of --data: bytes of text, or headerless token ids of 16 or 32 bits")
      ->check(CLI::IsMember({"bytes", "u16", "u32"}))
      ->capture_default_str();
  command
      .add_option("--threads", o.threads,
                  "compute threads per rank; ranks are bound to cores if each thread has one (default: cores / ranks)")
      ->transform(whole_number(1, 1024));
}

void add_train_options(CLI::App& command, TrainOptions& options) {
  add_step_options(command, options);
  add_world_options(command, options);
  add_run_options(command, options);
  add_loop_options(command, options);
  add_link_options(command, options);
  add_optimizer_settings(command, options);
  command.add_option("--eval", options.eval, "print the mean loss over this file after training")->type_name("FILE");
  command.add_option("--json", options.json, "write the results as JSON")->type_name("FILE");
  command
      .add_option("--peak-flops", options.peak_flops,
                  "peak of a rank's device, such as 312TFLOP/s, for the MFU (default: known for H100, H200 and A100)")
      ->type_name("FLOPS");
  command
      .add_option("--flight-recorder", options.flight_recorder,
                  "record the last calls of each rank in this directory, for report --postmortem after a failure")
      ->type_name("DIR");
  command
      .add_option("--trace", options.trace, "write the last step of every rank as a Chrome trace, which Perfetto opens")
      ->type_name("FILE");
}

}  // namespace tessera::tools
