#include "tools/train/options.h"

#include <charconv>

#include "tools/cli/machine.h"
#include "tools/cli/validators.h"
#include "tools/train/model_files.h"
#include "tools/train/run_checkpointer.h"

namespace tessera::tools {

namespace {

void add_model_options(CLI::App& command, TrainOptions& o) {
  command.add_option("--ranks", o.ranks, "world size; under a launcher it comes from there (default 4)")
      ->transform(whole_number(1, 4096));
  command.add_option("--backend", o.backend, "transport between the ranks; as TESSERA_BACKEND, which it overrides")
      ->capture_default_str()
      ->each([&o](const std::string&) { o.backend_given = true; });
  add_device_option(command, o.device);
  command.add_flag("--graphs", o.graphs,
                   "on one rank, forward and backward are recorded once and replayed as one graph of the device: for "
                   "small models");
  command
      .add_option("--model", o.model,
                  "a preset (tessera info --models) or a Hugging Face config.json of type gpt2 or llama")
      ->type_name("NAME|FILE")
      ->capture_default_str()
      ->each([&o](const std::string&) { o.model_given = true; });
  command
      .add_option("--data", o.data, "text files, read as bytes, or token files (default: the corpus of scripts/setup)")
      ->type_name("FILE[,FILE]")
      ->delimiter(',');
  command.add_option("--data-format", o.data_format, "bytes, or headerless token ids of 16 or 32 bits")
      ->check(CLI::IsMember({"bytes", "u16", "u32"}))
      ->capture_default_str();
  command.add_option("--init", o.init, "begin with the weights of a Hugging Face folder, which also gives the model")
      ->type_name("DIR");
}

void add_adapter_options(CLI::App& command, TrainOptions& o) {
  command
      .add_option("--lora", o.lora,
                  "train low-rank adapters of this rank (LoRA) on the model, which stays as it is; see --init")
      ->type_name("RANK")
      ->transform(whole_number(1, 1ULL << 20));
  command.add_option("--lora-alpha", o.lora_alpha, "adapters count alpha / rank (default: 8)")
      ->check(finite_number(std::numeric_limits<double>::min()));
  command
      .add_option("--lora-targets", o.lora_targets,
                  "which linear layers get adapters, by the end of their names (default: c_attn, or q_proj and v_proj)")
      ->type_name("A,B")
      ->delimiter(',');
  command
      .add_option("--quantize", o.quantize,
                  "with --lora: keep the model's linear weights in 4 bits (QLoRA), at rest and when they are gathered")
      ->check(CLI::IsMember({"nf4"}));
  command.add_option("--init-adapter", o.init_adapter, "begin with the adapters of a PEFT folder, beside --init")
      ->type_name("DIR");
}

void add_loop_options(CLI::App& command, TrainOptions& o) {
  constexpr std::uint64_t kMost = 1ULL << 40;
  command.add_option("--steps", o.steps, "optimizer steps")->transform(whole_number(0, kMost))->capture_default_str();
  command.add_option("--global-batch", o.global_batch, "sequences per optimizer step, over all ranks")
      ->transform(whole_number(1, kMost))
      ->capture_default_str();
  command.add_option("--seq-len", o.seq_len, "tokens per sequence (default: the model's context, at most 256)")
      ->transform(whole_number(1, kMost));
  command.add_option("--lr", o.lr, "learning rate, the highest of the schedule")
      ->check(finite_number())
      ->capture_default_str();
  command.add_option("--schedule", o.schedule, "how the learning rate goes on after the warm-up")
      ->check(CLI::IsMember({"constant", "cosine"}))
      ->capture_default_str();
  command.add_option("--warmup", o.warmup, "steps of linear warm-up")
      ->transform(whole_number(0, kMost))
      ->capture_default_str();
  command.add_option("--seed", o.seed, "of initial values, batch order and dropout")
      ->transform(whole_number(0, std::numeric_limits<std::uint64_t>::max()))
      ->capture_default_str();
  command
      .add_option("--precision", o.precision,
                  "of parameters, activations and gradients; the optimizer keeps f32 masters of 16-bit ones")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}))
      ->capture_default_str();
  command
      .add_option("--f32-modules", o.f32_modules,
                  "with --precision bf16 or f16: modules that stay in f32, by path or type:CLASS, such as "
                  "type:RMSNorm,lm_head; what they are called with is cast, and what they return is cast back")
      ->type_name("LIST")
      ->delimiter(',');
  command
      .add_option("--reduce-dtype", o.reduce_dtype,
                  "of gradients while they are reduced and kept: f32, or (default) as --precision")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  command
      .add_option("--accumulate", o.accumulate,
                  "microbatches in a step: each rank's part of the global batch in so many pieces")
      ->transform(whole_number(1, kMost))
      ->capture_default_str();
  command
      .add_option("--reduce-when", o.reduce_when,
                  "with --accumulate: gradients are reduced for every microbatch (default), after the last one, or "
                  "scattered for every one and all-reduced over replicas after the last")
      ->check(CLI::IsMember({"every", "last", "scatter"}));
  command.add_option("--norm-type", o.norm_type, "of gradients, for --clip-norm and as it is shown")
      ->check(CLI::IsMember({"1", "2", "3", "inf"}))
      ->capture_default_str();
  command.add_option("--clip-norm", o.clip_norm, "clip gradients to this norm over all parameters (0: don't)")
      ->check(finite_number(0))
      ->capture_default_str();
}

void add_optimizer_options(CLI::App& command, TrainOptions& o) {
  nn::OptimizerConfig& c = o.optimizer_config;
  command.add_option("--optimizer", o.optimizer, "adamw, adam or sgd")
      ->check(CLI::IsMember({"adamw", "adam", "sgd"}))
      ->capture_default_str();
  command.add_option("--betas", o.betas, "adam's decay rates")
      ->type_name("A,B")
      ->delimiter(',')
      ->expected(2)
      ->check(finite_number(0));
  command.add_option("--eps", c.eps, "adam's term against division by zero")
      ->check(finite_number(0))
      ->capture_default_str();
  command.add_option("--weight-decay", c.weight_decay, "not for norms and biases")
      ->check(finite_number(0))
      ->capture_default_str();
  command.add_option("--momentum", c.momentum, "of sgd")->check(finite_number(0))->capture_default_str();
  command.add_flag("--nesterov", c.nesterov, "sgd looks ahead by the momentum");
  command.add_flag("--amsgrad", c.amsgrad, "adam divides by the largest second moment seen");
  command.add_flag("--maximize", c.maximize, "ascend instead of descending");
}

void add_sharding_options(CLI::App& command, TrainOptions& o) {
  command.add_option("--mesh", o.mesh, "replicas x shards, for hsdp (default: 2 x ranks/2 on one host)")
      ->type_name("RxS");
  command
      .add_option("--collectives", o.collectives,
                  "what carries the collectives of every strategy: a plug-in (tessera info), or one for each "
                  "collective, as all_gather=int8,reduce_scatter=bf16; for one strategy: fsdp+int8; FILE.so:NAME of a "
                  "shared object too")
      ->type_name("[COLLECTIVE=]PLUGIN")
      ->delimiter(',');
  command.add_option("--sync-every", o.period.steps, "diloco, local_sgd: steps until the replicas meet (default 10)")
      ->transform(whole_number(1, 1 << 30));
  command
      .add_option("--outer-lr", o.period.outer_learning_rate,
                  "diloco, local_sgd: of the step that replicas take when they meet (default 0.7; 1)")
      ->check(finite_number(0));
  command.add_option("--outer-momentum", o.period.outer_momentum, "and its Nesterov momentum (default 0.9; 0)")
      ->check(finite_number(0));
  command
      .add_option("--wrap", o.wrap,
                  "what is gathered together: none, block, size:N, type:CLASS, or a list such as \"block;wte;ln_f\"; "
                  "tessera info --units shows what comes of it")
      ->capture_default_str();
  command.add_option("--prefetch", o.prefetch, "units gathered ahead of the one that computes")
      ->transform(whole_number(0, 1024))
      ->capture_default_str();
  command
      .add_option("--backward-prefetch", o.backward_prefetch,
                  "when a backward gathers the next unit: before it computes one (pre), or after (post)")
      ->check(CLI::IsMember({"pre", "post"}))
      ->capture_default_str();
  command
      .add_option("--limit-all-gathers", o.limit_all_gathers,
                  "units gathered at once beside the root, the one that computes included, whatever --prefetch says "
                  "(0: no limit)")
      ->transform(whole_number(0, 1024))
      ->capture_default_str();
  command
      .add_option("--reshard-after-forward", o.reshard_after_forward,
                  "true: all but the root; false: none; K: to K neighbours, which the backward gathers among; default: "
                  "all but the root and the last unit")
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
                  "with --accumulate: false keeps what a backward gathered for the next microbatch")
      ->check(CLI::IsMember({"true", "false"}));
  command.add_flag(
      "--checkpoint-activations", o.checkpoint_activations,
      "blocks keep only their inputs, and compute the rest again in the backward: less memory, a third more "
      "work, the same bits");
  command.add_flag("--cpu-offload", o.cpu_offload,
                   "what a strategy shards lies in the host's memory, and comes to the device when it is needed");
  command
      .add_option("--threads", o.threads,
                  "compute threads per rank (default: cores / ranks); where there is a core for each thread, ranks are "
                  "bound to their shares")
      ->transform(whole_number(1, 1024));
}

}  // namespace

void add_train_options(CLI::App& command, TrainOptions& options) {
  add_model_options(command, options);
  add_adapter_options(command, options);
  add_loop_options(command, options);
  add_optimizer_options(command, options);
  add_sharding_options(command, options);
  command.add_option("--eval", options.eval, "after training, the mean loss over this file")->type_name("FILE");
  command.add_option("--json", options.json, "write the results for programs")->type_name("FILE");
  command
      .add_option("--trace", options.trace, "write the last step of every rank as a Chrome trace (opens in Perfetto)")
      ->type_name("FILE");
}

}  // namespace tessera::tools
