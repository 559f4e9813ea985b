// tessera compare: the same training with several strategies, each in fresh processes, side by side.
#include <fmt/format.h>
#include <sys/times.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/comm/launch.h"
#include "tools/cli/commands.h"
#include "tools/cli/machine.h"
#include "tools/cli/output.h"
#include "tools/cli/validators.h"
#include "tools/compare/compare.h"
#include "tools/launch/launcher.h"
#include "tools/launch/ranks.h"
#include "tools/pages/page.h"
#include "tools/results/comparison.h"
#include "tools/results/rounds.h"

namespace tessera::tools {
namespace {

/// The time of this host's cores: all of it, what they were busy, and what this program took with the processes that it
/// has started and waited for.
struct CoreTicks {
  double all = 0, busy = 0, own = 0;
};

/// Nothing where the system doesn't say.
std::optional<CoreTicks> core_ticks() {
  std::ifstream file("/proc/stat");
  std::string word;
  std::array<double, 8> cores{};  // user, nice, system, idle, waiting for disks, interrupts, soft interrupts, stolen
  if (!(file >> word) || word != "cpu") return std::nullopt;
  CoreTicks now;
  for (double& ticks : cores) {
    if (!(file >> ticks)) return std::nullopt;
    now.all += ticks;
  }
  now.busy = now.all - cores[3] - cores[4];
  tms own{};
  ::times(&own);
  now.own = static_cast<double>(own.tms_utime + own.tms_stime + own.tms_cutime + own.tms_cstime);
  return now;
}

/// What other programs used of the cores' time since then, from 0 to 100.
std::optional<double> others_percent(const std::optional<CoreTicks>& start) {
  const std::optional<CoreTicks> end = core_ticks();
  if (!start || !end || end->all <= start->all) return std::nullopt;
  const double others = (end->busy - start->busy) - (end->own - start->own);
  return std::clamp(100 * others / (end->all - start->all), 0.0, 100.0);
}

/// Why runs over two mesh axes differ from the others if gradients are reduced in 16 bits; else "".
std::string rounding_note(const TrainPlan& plan, const Comparison& comparison) {
  if (plan.precision.reduce == base::DType::f32) return "";
  const auto two_axes = [](const RunResult& run) { return run.mesh[0] > 1 && run.mesh[1] > 1; };
  for (const RunResult& run : comparison.runs)
    for (const RunResult& other : comparison.runs)
      if (two_axes(run) && !two_axes(other) && run.final_parameters_hash != other.final_parameters_hash)
        return fmt::format(
            "{0} sums over two mesh axes and rounds to {1} after each, the others once; with --reduce-dtype f32 they "
            "are equal\n",
            run.strategy, base::name_of(plan.precision.reduce));
  return "";
}

/// Of the run whose ranks woke latest, compared with a transfer; nothing without --link.
std::optional<comm::Lateness> latest_of(const Comparison& comparison) {
  const auto most = std::ranges::max_element(comparison.runs, [](const auto& a, const auto& b) {
    return a.link && b.link && a.link->percent < b.link->percent;
  });
  return most->link;
}

void write_outputs(const CompareOptions& options, const TrainPlan& plan, const Comparison& comparison,
                   const std::vector<std::string>& traces) {
  print_clean("{}{}\n{}{}", comparison_table(comparison), equality_statement(comparison),
              rounding_note(plan, comparison), unequal_rounds_text(comparison.runs));
  print_clean("{}", differences_text(comparison.differences, comparison.rounds));
  if (comparison.rounds == 1 && comparison.runs.size() > 1)
    print_clean("times: one round is too few to say which is faster; use --repeat 6\n");
  for (const std::string& line : comparison.noise) print_clean("noise: {}\n", line);
  if (comparison.why) print_clean("{}", why_text(*comparison.why));
  if (const auto& lateness = latest_of(comparison)) print_clean("{}", lateness_line(*lateness));
  write_json(options.json, to_json(comparison));
  if (!options.report.empty()) write_file(options.report, pages::page({comparison}));
  if (options.trace.empty()) return;
  if (traces.size() == 1) return write_file(options.trace, traces[0]);
  for (std::size_t i = 0; i < traces.size(); ++i)
    write_file(options.trace + "." + trace_name(comparison.runs[i]) + ".json", traces[i]);
}

/// One plan for each wrapping.
std::vector<TrainPlan> plans_of(const CompareOptions& options, int ranks) {
  std::vector<std::string> wraps = options.wraps;
  if (!options.only_wrap.empty()) wraps = {options.only_wrap};
  if (wraps.empty()) wraps = {options.wrap};
  std::vector<TrainPlan> plans;
  for (const std::string& wrap : wraps) {
    TrainOptions one = options;
    one.wrap = wrap;
    one.products = nn::Products::own;
    plans.push_back(make_plan(one, ranks));
    if (!options.why.empty()) record_waits(plans.back());
  }
  return plans;
}

/// What makes the times of these runs less certain.
std::vector<std::string> noise_of(int ranks, std::optional<double> others_percent) {
  constexpr double kLoaded = 20;
  std::vector<std::string> lines;
  const std::size_t cores = allowed_cores().size();
  const int here = must_spawn(ranks) || ranks == 1 ? ranks : comm::resolve_launch().local_size;
  if (static_cast<std::size_t>(here) > cores)
    lines.push_back(
        fmt::format("{} ranks share {} core{}: they wait for each other's turns", here, cores, cores == 1 ? "" : "s"));
  if (others_percent.value_or(0) > kLoaded)
    lines.push_back(fmt::format("other programs used {:.0f} % of this host's cores", *others_percent));
  return lines;
}

/// Fills the runs and their differences. Returns the traces: each that of the run with the median time.
std::vector<std::string> combine(const std::vector<std::vector<CompareRun>>& results, Comparison& comparison) {
  std::vector<std::string> traces;
  for (const std::vector<CompareRun>& rounds : results) {
    comparison.runs.push_back(combine_rounds(each_of(rounds, &CompareRun::result)));
    RunResult& run = comparison.runs.back();
    const CompareRun& median = rounds[median_round(run.round_step_ms)];
    traces.push_back(median.trace);
    run.timeline = median.result.timeline;
  }
  comparison.backend = results.front().front().backend;  // the same for all of them
  comparison.rounds = results.front().size();
  if (comparison.rounds > 1) comparison.differences = differences_of(comparison.runs);
  return traces;
}

Why why_of(const CompareOptions& options, const std::vector<PlannedRun>& contestants,
           std::vector<std::vector<CompareRun>>& results) {
  const auto [from, to] = find_runs(options.why, each_of(contestants, &PlannedRun::name));
  const auto run_of = [&](std::size_t i, const std::string& name) {
    return PlannedRun{name_of(results[i].front().result), strategy_of_run(name), contestants[i].plan};
  };
  const auto parts_of = [&](std::size_t i) {
    return each_of(results[i], [](const CompareRun& run) { return run.result.parts.value(); });
  };
  comm::SlowLinks links = *contestants[from].plan.links;
  const bool fitted = contestants[from].plan.fits_links;
  if (fitted) {
    std::vector<RunResult*> runs;
    for (std::vector<CompareRun>& rounds : results)
      for (CompareRun& run : rounds) runs.push_back(&run.result);
    links = apply_link_fits(runs);
  }
  Why why =
      measured_why(run_of(from, options.why[0]), run_of(to, options.why[1]), {parts_of(from), parts_of(to)}, links);
  if (fitted) why.link += ", as measured";
  return why;
}

int compare(const CommandLine& commands, const CompareOptions& asked) {
  CompareOptions options = asked;
  options.strategies = strategies_for_why(options.why, options.strategies);
  const int ranks = world_size(options.ranks);
  std::vector<TrainPlan> plans = plans_of(options, ranks);
  const TrainPlan& plan = plans.front();
  if (options.steps < 1) throw base::InvalidUsage("--steps 0: a comparison needs at least one step");
  if (options.norm_type != "2" && options.clip_norm == 0)
    throw base::InvalidUsage("--norm-type " + options.norm_type +
                             ": a comparison shows no norms; give --clip-norm too");
  if (!options.only.empty()) return run_as_child(plan, options);

  const bool spawn = must_spawn(ranks);
  const bool first = spawn || ranks == 1 || comm::resolve_launch().rank == 0;
  std::vector<std::string> left_out;
  const std::vector<std::string> strategies = strategies_of(plan, left_out);
  for (const std::string& reason : left_out)
    if (first) print_clean("left out: {}\n", reason);
  if (first) check_results(options);
  warn_if_alone_under_launcher(ranks);
  if (first) warn_ineffective_options(options, strategies);
  if (first && !plan.model.note.empty()) print_clean(stderr, "tessera: {}\n", plan.model.note);
  Comparison comparison{.model = options.init.empty() ? options.model : options.init,
                        .parameters = plan.parameters,
                        .ranks = ranks,
                        .steps = options.steps,
                        .machine = machine_line(),
                        .command = commands.arguments};
  for (TrainPlan& one : plans)
    one.command = {{"--strategies", joined_by(strategies, ",")},
                   {"--wraps", joined_by(options.wraps, ",")},
                   {"--repeat", std::to_string(options.rounds())}};
  std::vector<PlannedRun> contestants;
  for (const std::string& strategy : strategies)
    for (const TrainPlan& wrapped : plans)
      contestants.push_back(
          {options.wraps.empty() ? strategy : strategy + " " + wrapped.options.wrap, strategy, wrapped});
  if (!options.why.empty()) {
    const auto [from, to] = find_runs(options.why, each_of(contestants, &PlannedRun::name));
    for (const std::size_t run : {from, to}) require_equal_steps(contestants[run]);
  }
  const std::optional<CoreTicks> before = core_ticks();
  std::vector<std::vector<CompareRun>> results;
  if (const int code = run_rounds(commands, options, contestants, ranks, results); code != 0) return code;
  if (first && !options.why.empty()) comparison.why = why_of(options, contestants, results);
  const std::vector<std::string> traces = combine(results, comparison);
  if (base::parse_device(options.device).type == base::DeviceType::cpu)
    comparison.products = nn::name_of(nn::products_of_environment(nn::Products::own));
  if (comparison.rounds > 1) comparison.noise = noise_of(ranks, spawn ? others_percent(before) : std::nullopt);
  if (first && !options.report.empty()) {
    try {  // a run that can't be simulated loses none of its results
      comparison.what_if = what_if_of(contestants, comparison.runs);
      if (comparison.what_if) comparison.what_if->command = plan_arguments(commands.app, options);
    } catch (const base::Error& error) {
      print_clean(stderr, "tessera: --report: no What if: {}\n", error.what());
    }
  }
  if (first) write_outputs(options, plan, comparison, traces);
  return 0;
}

}  // namespace

void add_compare(CommandLine& commands) {
  CLI::App* command = commands.app.add_subcommand(
      "compare", "train one model under several strategies and compare losses, memory, traffic and time");
  const auto options = std::make_shared<CompareOptions>();
  add_train_options(*command, *options);
  add_option(*command, "--strategies,--strategy", options->strategies,
             "strategies to run, each as in train --strategy (default: ddp zero1 zero2 fsdp hsdp)", list_of());
  add_option(*command, "--report", options->report, "write an HTML page with charts", "FILE.html");
  add_option(*command, "--wraps", options->wraps, "wrappings to run every strategy with, each as in --wrap", list_of())
      ->excludes("--wrap");
  add_option(*command, "--repeat", options->repeat,
             "rounds in which every run takes its turn; differences of times are shown with intervals from 6 on",
             {"R", whole_number(1, 1000)});
  add_option(*command, "--why", options->why,
             "print why a step of B takes longer than one of A, as a sum, and what would help "
             "(implies --repeat 6)",
             list_of());
  add_option(*command, "--programs", options->programs,
             "programs to run instead of strategies, each as in tessera run, and to compare with the first",
             list_of("NAME=PROGRAM[,..]"));
  command->add_option("--only", options->only)->group("");  // of the ranks that this command starts
  command->add_option("--only-wrap", options->only_wrap)->group("");
  command->callback([&commands, command, options] {
    commands.chosen = [&commands, command, options] {
      return options->programs.empty() ? compare(commands, *options) : compare_programs(*command, *options);
    };
  });
}

}  // namespace tessera::tools
