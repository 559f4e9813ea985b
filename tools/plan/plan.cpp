// tessera plan: what a training would need on machines that are not at hand.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <limits>
#include <map>
#include <memory>

#include "tessera/base/error.h"
#include "tools/cli/commands.h"
#include "tools/cli/output.h"
#include "tools/pages/page.h"
#include "tools/plan/cluster_file.h"
#include "tools/plan/model_plan.h"
#include "tools/plan/options.h"
#include "tools/plan/planned_why.h"
#include "tools/plan/zero_table.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;
using pages::full_name;
using pages::significant;
using pages::Table;

std::string memory_of(const ModelPlan& plan) {
  const std::vector<std::string> kinds = pages::device_memory_kinds();
  Table table{"Bytes of a rank at the peak, by kind", {"strategy", "peak"}, {}};
  table.head.insert(table.head.end(), kinds.begin(), kinds.end());
  ordered_json rows = ordered_json::array();
  for (const StepPlan& step : plan.runs) {
    const base::MemoryTracker::Snapshot& peak = step.result.peak_bytes;
    const std::vector<std::uint64_t> bytes(peak.at_peak.begin(), peak.at_peak.begin() + std::ssize(kinds));
    rows.push_back({full_name(step.result), bytes, plan.memory_bytes, peak.total_peak});
    std::vector<std::string>& row = table.rows.emplace_back(1, full_name(step.result));
    row.push_back(with_commas(peak.total_peak));
    for (const std::uint64_t value : bytes) row.push_back(with_commas(value));
  }
  return "<h2>Memory of a rank at the peak</h2>\n" +
         pages::chart("bars", {{"label", "Bytes at the peak by kind and strategy; the table below has the numbers"},
                               {"unit", "bytes"},
                               {"keys", kinds},
                               {"mark", plan.memory_bytes > 0 ? "memory of a rank" : ""},
                               {"rows", rows}}) +
         to_html(table);
}

std::string times_of(const ModelPlan& plan) {
  Table table{"Milliseconds per step, tokens per second of all ranks, and model FLOPs utilization",
              {"strategy", "step", "exposed communication", "tokens/s", "MFU", "bytes sent by a rank"},
              {}};
  ordered_json rows = ordered_json::array();
  for (const StepPlan& step : plan.runs) {
    const RunResult& run = step.result;
    rows.push_back(pages::step_bar(full_name(run), run));
    table.rows.push_back({full_name(run), significant(run.step_ms_median, 5),
                          significant(std::min(run.exposed_communication_ms, run.step_ms_median), 4),
                          with_commas(static_cast<std::int64_t>(run.tokens_per_second)),
                          step.mfu ? fmt::format("{:.1f}%", 100 * *step.mfu) : "-",
                          with_commas(run.wire_bytes_per_step.data())});
  }
  return "<h2>Time of a step</h2>\n" +
         pages::chart("bars", {{"label", "Milliseconds per step by strategy; the table below has the numbers"},
                               {"unit", "ms"},
                               {"keys", {"compute", "exposed communication"}},
                               {"rows", rows}}) +
         to_html(table);
}

std::string curves_of(const std::vector<ModelPlan>& plans, const std::string& title) {
  std::map<std::string, std::vector<double>> by_name;  // tokens per second and rank in each world, or NaN
  Table table{title + ": tokens per second and rank", {"strategy"}, {}};
  for (std::size_t i = 0; i < plans.size(); ++i) {
    table.head.push_back(fmt::format("{} ranks", plans[i].ranks));
    for (const StepPlan& step : plans[i].runs) {
      std::vector<double>& values = by_name[name_of(step.result)];
      values.resize(plans.size(), std::numeric_limits<double>::quiet_NaN());
      values[i] = step.result.tokens_per_second / plans[i].ranks;
    }
  }
  ordered_json lines = ordered_json::array();
  for (const auto& [name, values] : by_name) {
    lines.push_back({{"name", name}, {"values", values}});
    std::vector<std::string>& row = table.rows.emplace_back(1, name);
    for (const double value : values) row.push_back(std::isnan(value) ? "-" : significant(value, 5));
  }
  const std::vector<std::string> marks(table.head.begin() + 1, table.head.end());
  return "<h2>" + pages::escape(title) + "</h2>\n" +
         pages::chart("lines", {{"label", "Tokens per second and rank over the worlds of the table below"},
                                {"marks", marks},
                                {"lines", lines}}) +
         to_html(table);
}

std::string advice_of(const Advice& advice) {
  Table table{"The fastest for their memory", {"options", "peak", "step ms", "tokens/s"}, {}};
  ordered_json rows = ordered_json::array();
  for (const Candidate& one : advice.pareto) {
    rows.push_back(
        {one.command_line(), {one.peak_bytes()}, advice.memory_bytes, significant(one.step_ms(), 4) + " ms"});
    table.rows.push_back({one.command_line(), human_bytes(one.peak_bytes()), significant(one.step_ms(), 5),
                          with_commas(static_cast<std::int64_t>(one.plan.result.tokens_per_second))});
  }
  std::string html = "<h2>Memory against time</h2>\n<p class=\"verdict\">" +
                     pages::escape("Take " + advice.pareto.back().command_line()) + "</p>\n";
  for (const std::string& reason : advice.reasons) html += "<p>" + pages::escape(reason) + "</p>\n";
  return html +
         pages::chart("bars",
                      {{"label", "Peak of a rank, by rising memory and falling time; the table has the numbers"},
                       {"unit", "bytes"},
                       {"keys", ordered_json::array({"peak of a rank"})},
                       {"mark", advice.memory_bytes > 0 ? "memory of a rank" : ""},
                       {"rows", rows}}) +
         to_html(table);
}

/// The page of --model: pictures and tables of simulated steps. One self-contained HTML file.
std::string plan_page(const ModelPlan& plan, const std::optional<Scaling>& scaling, const std::optional<Advice>& advice,
                      const std::optional<Why>& why) {
  const std::string title =
      fmt::format("{} on {} rank{} of {}", plan.model, plan.ranks, plan.ranks == 1 ? "" : "s", plan.cluster);
  std::string body = "<h1>" + pages::escape(title) + "</h1>\n<p class=\"soft\">" +
                     pages::escape(with_commas(plan.parameters) + " parameters; simulated") + "</p>\n";
  if (advice) body += advice_of(*advice);
  body += memory_of(plan) + times_of(plan);
  if (scaling) {
    body += curves_of(scaling->weak, "Weak scaling");
    if (!scaling->strong.empty()) body += curves_of(scaling->strong, "Strong scaling");
  }
  if (why) {
    const Comparison terms{.why = why};
    body += "<section>\n" + pages::picture_data(terms) + pages::gap_pictures(terms) + "</section>\n";
  }
  return pages::document(title, body);
}

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
    write_file(plan.runs.size() == 1 ? path : path + "." + trace_name(run.result) + ".json",
               chrome_trace(run.events, transfer_events(run)));
}

/// Refuses those of these options that are given.
void refuse_options(const CLI::App& command, const char* with, std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (command.count(name) > 0)
      throw base::InvalidUsage(fmt::format("{} has no effect on {}; leave one of the two out", name, with));
}

/// The runs of --why are planned unless others are asked for.
PlanOptions with_planned_runs(const CLI::App& command, PlanOptions options) {
  if (options.why.empty()) return options;
  refuse_options(command, "--why", {"--slow-rank", "--slow-link", "--jitter", "--advise"});
  options.strategies = strategies_for_why(options.why, options.strategies);
  return options;
}

Why plan_gap(const PlanOptions& options, int ranks, const ClusterSpec& cluster, const ModelPlan& plan) {
  const auto names = each_of(plan.runs, [](const StepPlan& run) { return name_of(run.result); });
  const auto [from, to] = find_runs(options.why, names);
  const auto plan_of = [&](const RunResult& run) {
    return train_plan(options, run.wrap.empty() ? options.wrap : run.wrap, ranks, cluster);
  };
  const TrainPlan from_plan = plan_of(plan.runs[from].result), to_plan = plan_of(plan.runs[to].result);
  const LinkedMachine machine{*slow_links_of(options, ranks, "cpu"), parse_machine(options.machine, "--machine"),
                              ranks};
  const PlannedRun a{names[from], strategy_of_run(options.why[0]), from_plan};
  const PlannedRun b{names[to], strategy_of_run(options.why[1]), to_plan};
  for (const PlannedRun* run : {&a, &b}) require_equal_steps(*run);
  return planned_why(a, b, machine);
}

int model_plan(const CLI::App& command, const PlanOptions& asked) {
  PlanOptions options = with_planned_runs(command, asked);
  const std::vector<int> ranks = ranks_of(options);
  if (ranks.size() > 1)
    throw base::InvalidUsage("--ranks: several numbers need --parameters; use --scale with --model");
  fit_batch(options, ranks[0]);
  if (!options.memory.empty() && !options.advise)
    throw base::InvalidUsage("--memory has no effect without --advise; leave it out");
  if (options.advise)  // the search tries its own values of these, and simulates no unequal ranks
    refuse_options(command, "--advise",
                   {"--mesh", "--wraps", "--prefetch", "--reshard-after-forward", "--checkpoint-activations",
                    "--accumulate", "--slow-rank", "--slow-link", "--jitter"});
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
  for (const std::string& reason : skipped) print_clean("left out: {}\n", reason);
  if (!plan.note.empty()) print_clean(stderr, "tessera: {}\n", plan.note);
  std::vector<std::string> strategies;
  for (const StepPlan& run : plan.runs)
    strategies.push_back(run.result.strategy.substr(0, run.result.strategy.find('+')));
  if (!options.advise) warn_ineffective_options(options, strategies);  // which tries its own values
  if (variation_of(options) && !(options.trace.empty() && options.report.empty()))
    print_clean(stderr, "tessera: --trace and the pictures of --report show the step of equal ranks\n");
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
