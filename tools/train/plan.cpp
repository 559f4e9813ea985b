#include "tools/train/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <tuple>

#include "tessera/base/cores.h"
#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/comm/launch.h"
#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/wrap.h"
#include "tessera/nn/hf_checkpoint.h"
#include "tessera/nn/models/causal_model.h"
#include "tessera/nn/variables.h"
#include "tools/cli/machine.h"
#include "tools/cli/output.h"
#include "tools/cli/quantities.h"
#include "tools/train/model_files.h"
#include "tools/train/model_task.h"
#include "tools/train/run_checkpointer.h"

namespace tessera::tools {

using base::InvalidUsage;

namespace {

/// The ranks of a host divide its cores among them. A launcher may have bound this rank, so the host's cores count, not
/// the rank's.
int threads_of(const TrainOptions& o, int ranks_per_host) {
  if (o.threads) return *o.threads;
  const int cores = comm::resolve_launch().size > 1 ? base::host_cores() : base::usable_cores();
  return std::max(1, cores / ranks_per_host);
}

/// The corpus that scripts/setup unpacked: beside the build (`<directory of the program>/../corpus/gcide.txt`), else
/// installed (`/usr/share/tessera/corpus/gcide.txt`). Throws InvalidUsage that explains how to get it.
std::string default_corpus() {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  const fs::path built = (program.parent_path() / ".." / "corpus" / "gcide.txt").lexically_normal();
  const fs::path installed = "/usr/share/tessera/corpus/gcide.txt";
  for (const fs::path& path : {built, installed})
    if (fs::is_regular_file(path, error)) return path.string();
  throw InvalidUsage("no text to train on: neither '" + built.string() + "' nor '" + installed.string() +
                     "' is there; run scripts/setup, or give --data FILE");
}

nn::ModelConfig model_of(const TrainOptions& o, const std::string& checkpoint) {
  if (!o.init.empty() && !checkpoint.empty())
    throw InvalidUsage("--init " + o.init + " with --resume " + o.resume +
                       ": the checkpoint has the values; leave --init out");
  if (o.init.empty() && checkpoint.empty()) return nn::find_config(o.model);
  nn::ModelConfig config = checkpoint.empty() ? nn::HfCheckpointReader(o.init).config() : model_in(checkpoint);
  if (o.model_given) {
    if (!config.same_model(nn::find_config(o.model)))
      throw InvalidUsage("--model " + o.model + " is not the model in " +
                         (checkpoint.empty() ? "--init " + o.init : "--resume " + o.resume) + "; leave --model out");
  }
  return config;
}

/// True if a byte of text is no token of this model: it was trained with a tokenizer. A model that says nothing of
/// special tokens has those of its type.
bool has_tokenizer(const TrainOptions& o, const nn::ModelConfig& model) {
  namespace fs = std::filesystem;
  std::error_code error;
  for (const char* name : {"tokenizer.json", "tokenizer.model", "vocab.json"})
    if (fs::exists(fs::path(o.init) / name, error)) return true;
  return model.vocabulary > 256 && !model.token_ids.empty();
}

std::shared_ptr<const nn::TokenDataset> open_data(const TrainOptions& o, const std::vector<std::string>& files,
                                                  const nn::ModelConfig& model) {
  if (!o.init.empty() && o.data_format == "bytes" && has_tokenizer(o, model))
    throw InvalidUsage(
        fmt::format("{}: --data-format bytes, but the {} tokens of --init {} are those of its tokenizer; write the ids "
                    "that it gives for the text, such as by numpy.array(ids, '<u2').tofile(FILE), and give "
                    "--data-format u16 or u32",
                    files.front(), model.vocabulary, o.init));
  return std::make_shared<const nn::TokenDataset>(files, nn::parse_token_format(o.data_format), model.vocabulary);
}

/// Opens the files that the run reads; the readers report errors in them.
void open_files(TrainPlan& plan) {
  const TrainOptions& o = plan.options;
  if (plan.task) return;  // it opens its own
  if (o.steps > 0) {
    plan.data = open_data(o, o.data.empty() ? std::vector{default_corpus()} : o.data, plan.model);
    const nn::BatchSampler check(plan.data, {plan.data->training(), plan.seq_len, o.global_batch, o.seed});
  }
  if (!o.eval.empty()) {
    plan.eval = open_data(o, {o.eval}, plan.model);
    const nn::SequentialSampler check(plan.eval, plan.eval->all(), plan.seq_len);
  }
}

nn::Products products_of(const TrainOptions& options) {
  const bool asked = base::read_env(nn::kProductsVariable).has_value();
  const nn::Products products = nn::products_of_environment(options.products);
  if (asked && products == nn::Products::own && base::parse_device(options.device).type == base::DeviceType::cuda)
    throw InvalidUsage("TESSERA_PRODUCTS=own with --device " + options.device +
                       ": its products are cuBLASLt's; unset the variable, or use --device cpu");
  return products;
}

/// Each rank would choose its own algorithms, and a run would not have the bits of the next.
void check_trial(int ranks) {
  if (ranks > 1 && base::env_or_default(nn::kMatmulVariable).starts_with("try:"))
    throw InvalidUsage(
        "TESSERA_MATMUL=try:FILE with " + std::to_string(ranks) +
        " ranks: one rank tries algorithms for all; use --ranks 1, and TESSERA_MATMUL=FILE in the runs after it");
}

/// The tool's model that is named.
void resolve_model(TrainPlan& plan) {
  const TrainOptions& o = plan.options;
  plan.model = model_of(o, plan.checkpoint);
  plan.lora = lora_of(o, plan.checkpoint, plan.model);
  plan.quantized = quantized_of(o, plan.checkpoint, plan.lora.has_value());
  plan.seq_len = o.seq_len.value_or(std::min<std::int64_t>(plan.model.context, 256));
  if (plan.seq_len > plan.model.context)
    throw InvalidUsage("--seq-len " + std::to_string(plan.seq_len) + " is longer than the model's context of " +
                       std::to_string(plan.model.context));
}

/// Makes the model without data, so that an error in its names, options or files is reported before the ranks start.
void check_model(TrainPlan& plan) {
  const TrainOptions& o = plan.options;
  nn::Context context;
  const auto task = make_task(plan, context);
  plan.can_be_simulated = dynamic_cast<fsdp::NnTask*>(task.get()) != nullptr;
  if (o.simulated && !o.untimed && !plan.can_be_simulated)
    throw InvalidUsage("--model " + o.model +
                       " computes by another library, so the times of its step can only be measured: use train, "
                       "compare, bench --of-step or explain --run");
  if (plan.task) plan.seq_len = task->tokens_per_sample();
  if (plan.task && !o.eval.empty() && task->evaluation_samples() == 0)
    throw InvalidUsage("--eval with --model " + o.model + ": it has no samples for an evaluation; leave --eval out");
  fsdp::make_units(task->model().root(), o.wrap);
  check_sources(*task, plan);
  if (comm_variable("TESSERA_LAUNCHER") != "tessera") check_f16_values(*task, plan);  // else the launcher did it
  plan.parameters = plan.task ? 0 : nn::parameter_count(plan.model);  // in 4 bits a tensor has fewer elements
  for (const auto& parameter : task->model().root().parameters())
    if (plan.task || nn::is_adapter(parameter->name())) plan.parameters += parameter->count();
}

}  // namespace

std::string product_dtype_of(const TrainPlan& plan) {
  return plan.fp8 ? "fp8" : std::string(base::name_of(plan.precision.compute));
}

void fit_batch(StepOptions& o, int ranks) {
  if (o.accumulate == 1)
    for (const auto& [given, name] : {std::pair(!o.reduce_when.empty(), "--reduce-when"),
                                      {!o.reshard_after_backward.empty(), "--reshard-after-backward"}})
      if (given) throw InvalidUsage(std::string(name) + " needs --accumulate of 2 or more");
  const std::int64_t parts = ranks * o.accumulate;
  if (!o.batch_given) o.global_batch = (o.global_batch + parts - 1) / parts * parts;
  o.batch_given = true;
  if (o.global_batch % parts == 0) return;
  throw InvalidUsage(
      fmt::format("--global-batch {} can't be split evenly over {} ranks{}; use a multiple of {}", o.global_batch,
                  ranks, o.accumulate == 1 ? "" : fmt::format(" and {} microbatches each", o.accumulate), parts));
}

std::string graph_obstacle(const TrainPlan& plan) {
  const TrainOptions& o = plan.options;
  const nn::ModelConfig& m = plan.model;
  for (const auto& [stands, what] : {
           std::pair(plan.task.has_value(), std::string("the model is of a plug-in file, whose steps may differ")),
           {base::parse_device(o.device).type == base::DeviceType::cpu,
            "device " + o.device + " has no graphs; use --device cuda"},
           {plan.ranks > 1,
            std::to_string(plan.ranks) + " ranks wait for each other on several streams; use --ranks 1"},
           {m.embedding_dropout > 0 || m.residual_dropout > 0 || m.attention_dropout > 0,
            "the model has dropout, whose masks change with every step; set it to 0"},
           {o.accumulate > 1, "--accumulate changes what a backward does with gradients; leave one of the two out"},
           {o.precision == "f16", "the loss scale of f16 changes from step to step; use bf16"},
           {o.cpu_offload, "--cpu-offload copies parameters on another stream; leave one of the two out"},
           {plan.precision.casts(), "--reduce-dtype " + o.reduce_dtype + " converts gradients; leave it out"},
           {!o.trace.empty(), "a replayed graph has no events for --trace; leave one of the two out"},
           {!o.report.empty(), "a replayed graph has no events for --report; leave one of the two out"},
       })
    if (stands) return what;
  return "";
}

GraphUse graph_use_of(const TrainPlan& plan) {
  const std::optional<bool>& wanted = plan.options.graphs;
  if (wanted == false) return GraphUse::never;
  const std::string obstacle = graph_obstacle(plan);
  if (obstacle.empty()) return wanted ? GraphUse::required : GraphUse::if_possible;
  if (wanted) throw InvalidUsage("--graphs: " + obstacle);
  return GraphUse::never;
}

TrainPlan make_plan(const TrainOptions& options, int ranks) {
  TrainPlan plan;
  plan.options = options;
  plan.ranks = ranks;
  check_device(options.device);
  check_trial(ranks);
  if (base::parse_device(options.device).type == base::DeviceType::cpu) plan.options.cpu_offload = false;
  const comm::Launch launch = comm::resolve_launch();
  plan.ranks_per_host = std::max(1, launch.size > 1 ? launch.local_size : ranks);
  plan.threads = threads_of(options, plan.ranks_per_host);
  plan.products = products_of(options);
  plan.links = slow_links_of(options, ranks, options.device);
  if (options.hosts > 1) plan.ranks_per_host = ranks / options.hosts;
  plan.checkpoint = checkpoint_to_resume(options);
  plan.task = plugin_task_of(options);
  if (!plan.task) resolve_model(plan);
  fit_batch(plan.options, ranks);
  if (!options.mesh.empty()) fsdp::parse_mesh(options.mesh);
  if (options.backward_prefetch == "post" && options.prefetch == 0)
    throw InvalidUsage(
        "--backward-prefetch post with --prefetch 0: nothing is unsharded ahead; leave one of the two out");
  plan.schedule = schedule_of(options, options.steps);
  plan.precision = precision_of(options);
  plan.fp8 = fp8_of(options);
  if (plan.fp8) check_fp8(options.device);
  if (plan.fp8 && plan.quantized)
    throw InvalidUsage("--precision fp8 with --quantize nf4: the weights are in 4 bits already; use bf16");
  if (!options.peak_flops.empty()) plan.peak_flops = parse_flops(options.peak_flops, "--peak-flops");
  plan.graphs = graph_use_of(plan);
  check_period(options);
  plan.options.optimizer_config = optimizer_of(options);
  open_files(plan);
  if (!plan.checkpoint.empty()) plan.first_step = check_resumed(plan);
  check_model(plan);
  return plan;
}

void check_results(const TrainOptions& o) {
  std::vector<std::string> inputs = o.data;
  inputs.insert(inputs.end(), {o.eval, o.model});
  check_outputs({{"--json", o.json}, {"--log-csv", o.log_csv}, {"--trace", o.trace}, {"--report", o.report}}, inputs);
  check_directory("--flight-recorder", o.flight_recorder, "rank-0.flight");
}

void warn_ineffective_options(const StepOptions& o, const std::vector<std::string>& strategies) {
  const auto none = [&](const auto& uses) {
    return std::ranges::none_of(strategies, [&](const std::string& name) {
      return uses(fsdp::parse_strategy(name, fsdp::CollectiveRegistry::built_in()));
    });
  };
  const bool gathers = !none([](const fsdp::Strategy& s) { return !s.optimizer.empty(); });
  const bool shards = !none([](const fsdp::Strategy& s) { return !s.param_at_rest.empty(); });
  const bool has_mesh = !none([](const fsdp::Strategy& s) { return s.two_axes; });
  const bool sgd = o.optimizer == "sgd";
  const nn::OptimizerConfig usual;
  const std::string by = " with --strategy " + joined_by(strategies, ",");
  const std::tuple<bool, std::string, std::string> ineffective[] = {
      {!o.mesh.empty() && !has_mesh, "--mesh", by + ", whose mesh has one axis"},
      {o.prefetch != 1 && !gathers, "--prefetch", by + ", which gathers nothing"},
      {o.backward_prefetch != "pre" && !shards, "--backward-prefetch", by + ", which reshards no parameters"},
      {o.limit_all_gathers != 0 && !gathers, "--limit-all-gathers", by + ", which gathers nothing"},
      {!o.reshard_after_forward.empty() && !shards, "--reshard-after-forward", by + ", which reshards no parameters"},
      {!o.reshard_after_backward.empty() && !shards, "--reshard-after-backward", by + ", which reshards no parameters"},
      {sgd && o.betas != std::vector{usual.beta1, usual.beta2}, "--betas", " with --optimizer sgd"},
      {sgd && o.optimizer_config.eps != usual.eps, "--eps", " with --optimizer sgd"},
  };
  for (const auto& [is, option, reason] : ineffective)
    if (is) print_clean(stderr, "tessera: {} does nothing{}\n", option, reason);
}

void warn_ineffective_options(const TrainOptions& o, const std::vector<std::string>& strategies) {
  warn_ineffective_options(static_cast<const StepOptions&>(o), strategies);
  if (o.cpu_offload && base::parse_device(o.device).type == base::DeviceType::cpu)
    print_clean(stderr, "tessera: --cpu-offload does nothing with --device {}: it already uses host memory\n",
                o.device);
  if (o.steps == 0 && !o.save.empty())
    print_clean(stderr, "tessera: --save does nothing with --steps 0, which writes no checkpoint; use --export\n");
  if (o.steps == 0 && !o.trace.empty()) print_clean(stderr, "tessera: --trace does nothing with --steps 0\n");
}

WorldInitOptions world_of(const TrainPlan& plan, std::shared_ptr<base::MemoryTracker> memory_tracker) {
  const TrainOptions& o = plan.options;
  return {.ranks = plan.ranks,
          .backend = o.backend_given ? o.backend : "",
          .memory_tracker = std::move(memory_tracker),
          .device = device_of_rank(o.device),
          .flight_recorder = o.flight_recorder};
}

LaunchSpec training_launch_spec(const TrainPlan& plan, std::vector<std::string> arguments) {
  // Passed by the process that sees all cores: a bound rank sees only its share.
  if (!plan.options.threads) arguments.insert(arguments.end(), {"--threads", std::to_string(plan.threads)});
  LaunchSpec launch_plan =
      plan_for_this_program(plan.ranks, arguments, plan.options.backend_given ? plan.options.backend : "");
  launch_plan.bind_to_cores = launch_plan.prefix.empty() && plan.ranks * plan.threads <= base::usable_cores();
  if (const std::string& records = plan.options.flight_recorder; !records.empty()) {
    launch_plan.failure_note = "tessera report --postmortem " + records + " shows what the ranks did last";
    launch_plan.failure_file = records + "/" + kFirstCause;
  }
  return launch_plan;
}

}  // namespace tessera::tools
