// tessera plan: what a training would need on machines that are not at hand.
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <memory>

#include "tessera/base/error.h"
#include "tools/cli/commands.h"
#include "tools/cli/output.h"
#include "tools/plan/cluster_file.h"
#include "tools/plan/model_plan.h"
#include "tools/plan/options.h"
#include "tools/plan/plan_page.h"
#include "tools/plan/planned_why.h"
#include "tools/plan/zero_table.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

int list_clusters(const CLI::App& command, const PlanOptions& options) {
  refuse_other_options(command, "--cluster list", {"--cluster", "--json"});
  ordered_json clusters = ordered_json::array();
  for (const ClusterSpec& cluster : cluster_presets()) {
    print_clean("{:<12} {}\n", cluster.name, cluster.description);
    clusters.push_back({{"name", cluster.name}, {"description", cluster.description}});
  }
  write_json(options.json, {{"clusters", clusters}});
  return 0;
}

/// Writes the cluster as a file, or prints it.
int write_cluster(const CLI::App& command, const PlanOptions& options) {
  refuse_other_options(command, "--cluster without --parameters or --model", {"--cluster", "--json"});
  const ClusterSpec cluster = find_cluster(options.cluster);
  if (options.json.empty()) {
    print_json(to_json(cluster), 1);
    return 0;
  }
  write_json(options.json, to_json(cluster));
  print_clean("{}: {}\nwrote {}\n", cluster.name, cluster.description, options.json);
  return 0;
}

ZeroTableSpec zero_table_spec(const CLI::App& command, const PlanOptions& options) {
  ZeroTableSpec spec{.parameters = parse_count(options.parameters, "--parameters"),
                     .ranks = ranks_of(options),
                     .strategies = options.strategies,
                     .mesh = options.mesh};
  PlanOptions resolved = options;
  if (command.count("--precision") == 0) resolved.precision = "bf16";  // that of the paper
  spec.precision = precision_of(resolved);
  spec.optimizer = optimizer_of(options);
  if (options.cluster.empty()) return spec;
  const ClusterSpec cluster = find_cluster(options.cluster);
  for (const int ranks : spec.ranks) check_room(cluster, ranks);
  spec.ranks_per_host = cluster.ranks_per_host;
  spec.memory_bytes = cluster.compute.memory_bytes;
  return spec;
}

int zero_table(const CLI::App& command, const PlanOptions& options) {
  refuse_other_options(
      command, "--parameters",
      {"--parameters", "--ranks", "--precision", "--reduce-dtype", "--optimizer", "--betas", "--eps", "--weight-decay",
       "--momentum", "--nesterov", "--amsgrad", "--mesh", "--strategies", "--cluster", "--json", "--report"});
  const ZeroTable table(zero_table_spec(command, options));
  print_clean("{}", table.text());
  write_json(options.json, table.json());
  if (!options.report.empty()) write_file(options.report, table.page());
  return 0;
}

/// One file, or with several runs one for each, as compare names them.
void write_traces(const std::string& path, const ModelPlan& plan) {
  for (const StepPlan& run : plan.runs)
    write_file(plan.runs.size() == 1 ? path : path + "." + trace_name(run.result) + ".json", trace_text(run));
}

void print_left_out(const std::vector<std::string>& skipped) {
  for (const std::string& reason : skipped) print_clean("left out: {}\n", reason);
}

/// Refuses options for which the search tries its own values, and those of unequal ranks, which it does not simulate.
void refuse_searched_options(const CLI::App& command) {
  for (const char* name : {"--mesh", "--wraps", "--prefetch", "--reshard-after-forward", "--checkpoint-activations",
                           "--accumulate", "--slow-rank", "--slow-link", "--jitter"})
    if (command.count(name) > 0)
      throw base::InvalidUsage(fmt::format("{} has no effect on --advise; leave one of the two out", name));
}

/// The runs of --why are planned unless others are asked for.
PlanOptions with_planned_runs(const CLI::App& command, PlanOptions options) {
  if (options.why.empty()) return options;
  for (const char* name : {"--slow-rank", "--slow-link", "--jitter", "--advise"})
    if (command.count(name) > 0)
      throw base::InvalidUsage(fmt::format("{} has no effect on --why; leave one of the two out", name));
  options.strategies = strategies_for_why(options.why, options.strategies);
  return options;
}

Why plan_gap(const PlanOptions& options, int ranks, const ClusterSpec& cluster, const ModelPlan& plan) {
  std::vector<RunName> names;
  for (const StepPlan& run : plan.runs) names.push_back({run.result.strategy, run.result.wrap});
  const auto [from, to] = find_runs(options.why, names);
  const auto plan_of = [&](const RunName& name) {
    return train_plan(options, name.wrap.empty() ? options.wrap : name.wrap, ranks, cluster);
  };
  const TrainPlan from_plan = plan_of(names[from]), to_plan = plan_of(names[to]);
  const auto [from_name, to_name] = runs_of_why(options.why);
  const LinkedMachine machine{*slow_links_of(options, ranks, "cpu"), parse_machine(options.machine, "--machine"),
                              ranks};
  return planned_why({name_of(plan.runs[from].result), from_name.strategy, from_plan},
                     {name_of(plan.runs[to].result), to_name.strategy, to_plan}, machine);
}

int model_plan(const CLI::App& command, const PlanOptions& asked) {
  PlanOptions options = with_planned_runs(command, asked);
  const std::vector<int> ranks = ranks_of(options);
  if (ranks.size() > 1)
    throw base::InvalidUsage("--ranks: several numbers need --parameters; use --scale with --model");
  fit_batch(options, ranks[0]);
  if (!options.memory.empty() && !options.advise)
    throw base::InvalidUsage("--memory has no effect without --advise; leave it out");
  if (options.advise) refuse_searched_options(command);
  const ClusterSpec cluster = cluster_of(options, ranks[0]);
  if (options.cpu_offload && cluster.compute.kind == ComputeSpec::Kind::host)
    print_clean(stderr, "tessera: --cpu-offload does nothing on cluster {}: its ranks already use host memory\n",
                cluster.name);
  std::optional<Advice> advice;
  if (options.advise) advice = advise(options, ranks[0], cluster);
  std::vector<std::string> skipped;
  const ModelPlan plan = plan_model(options, ranks[0], cluster, &skipped);
  std::optional<Scaling> scaling;
  if (!options.scale.empty()) scaling = plan_scaling(options, ranks[0], cluster);
  std::optional<Why> why;
  if (!options.why.empty()) why = plan_gap(options, ranks[0], cluster, plan);
  print_left_out(skipped);
  if (!plan.note.empty()) print_clean(stderr, "tessera: {}\n", plan.note);
  print_clean("{}{}{}{}", to_text(plan), scaling ? to_text(*scaling) : "", advice ? to_text(*advice) : "",
              why ? why_text(*why) : "");
  ordered_json json = to_json(plan);
  if (scaling) json["scale"] = to_json(*scaling);
  if (advice) json["advice"] = to_json(*advice);
  if (why) json["why"] = to_json(*why);
  write_json(options.json, json);
  if (!options.trace.empty()) write_traces(options.trace, plan);
  if (!options.report.empty()) write_file(options.report, plan_page(plan, scaling, advice, why));
  return 0;
}

int plan(const CLI::App& command, const PlanOptions& options) {
  check_outputs({{"--json", options.json}, {"--report", options.report}, {"--trace", options.trace}},
                {options.cluster, options.model});  // which may be files
  if (options.cluster == "list") return list_clusters(command, options);
  if (!options.parameters.empty()) return zero_table(command, options);
  if (!options.model_given && !options.cluster.empty()) return write_cluster(command, options);
  if (!options.model_given)
    throw base::InvalidUsage("plan: give --model NAME|FILE, --parameters N, such as 7.5e9, or --cluster list");
  return model_plan(command, options);
}

}  // namespace

void add_plan(CommandLine& commands) {
  CLI::App* command = commands.app.add_subcommand(
      "plan", "simulate a training step on machines that are not at hand: memory, traffic and time");
  const auto options = std::make_shared<PlanOptions>();
  add_plan_options(*command, *options);
  command->callback(
      [&commands, command, options] { commands.chosen = [command, options] { return plan(*command, *options); }; });
}

}  // namespace tessera::tools
