// tessera bench: the times of collectives, and whether their results are right.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/comm/host_collectives.h"
#include "tessera/comm/init.h"
#include "tessera/comm/launch.h"
#include "tools/bench/baseline.h"
#include "tools/bench/options.h"
#include "tools/bench/output.h"
#include "tools/bench/tuner.h"
#include "tools/cli/commands.h"
#include "tools/cli/machine.h"
#include "tools/cli/output.h"
#include "tools/launch/ranks.h"
#include "tools/plan/options.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

/// Creates the communicator of all ranks. Unlike in training, sums may use any order unless the environment requires
/// one.
std::unique_ptr<comm::Communicator> join(const BenchSpec& plan, const std::string& backend,
                                         const std::shared_ptr<base::DeviceRuntime>& device,
                                         const std::optional<std::string>& algorithms) {
  comm::InitOptions config;
  if (!device->host_accessible()) config.device = device;
  config.backend = backend;
  config.algorithms = algorithms;
  config.timeout = plan.time_limit;
  if (plan.ranks == 1) config.launch = comm::Launch{};
  if (!comm_variable("TESSERA_DETERMINISTIC")) config.deterministic = false;
  return comm::init(std::move(config));
}

/// Runs as a rank that this tool started; prints its messages for its parent as a line each.
int run_as_child(const BenchOptions& options, const BenchSpec& plan) {
  const auto device = base::open_device(device_of_rank(plan.device));
  const auto world = join(plan, options.only, device, options.algorithms);
  run_bench(plan, *world, *device, {.on_message = [](const ordered_json& message) { print_json(message); }});
  return 0;
}

void print_message(BenchReport& report, const std::string& backend, const ordered_json& message,
                   const BenchOptions& options) {
  print_now(report.add(backend, message));
  if (message.contains("interval")) write_results(options, report, false);
}

/// What ranks of another launcher, each of which has a command line of its own, must have alike.
std::vector<comm::SharedSetting> shared_settings_of(const BenchOptions& o, const BenchSpec& plan) {
  const auto joined = [](const auto& list) { return fmt::format("{}", fmt::join(list, ",")); };
  const auto flag = [](bool value) { return std::string(value ? "given" : "not given"); };
  return {{"the operations", joined(o.ops)},
          {"--min-bytes", std::to_string(plan.min_bytes)},
          {"--max-bytes", std::to_string(plan.max_bytes)},
          {"--factor", std::to_string(plan.factor)},
          {"--dtype", joined(o.dtypes)},
          {"--op", joined(o.redops)},
          {"--root", std::to_string(plan.root)},
          {"--device", plan.device.substr(0, plan.device.find(':'))},
          {"--memory", o.memory},
          {"--iterations", std::to_string(plan.iterations.value_or(0))},
          {"--warmup", std::to_string(plan.warmup)},
          {"--check", flag(plan.check)},
          {"--cold", flag(plan.cold)},
          {"--aggregate", flag(plan.aggregate)},
          {"--misaligned", flag(plan.misaligned)},
          {"--overlap", flag(plan.overlap)},
          {"--pattern", o.pattern},
          {"--duration", o.endless ? "endless" : o.duration},
          {"--interval", o.interval},
          {"--time-limit", o.time_limit},
          {"--link", o.link},
          {"--link-intra", o.link_intra},
          {"--hosts", std::to_string(o.hosts)}};
}

/// Runs as a rank that another launcher started.
int run_here(const BenchOptions& options, const BenchSpec& plan, const std::optional<BenchFile>& baseline) {
  if (plan.backends.size() > 1)
    throw base::InvalidUsage(
        fmt::format("--backends {}: under a launcher one run has one backend; start it once for each",
                    fmt::join(plan.backends, ",")));
  if (!options.tune.empty())
    throw base::InvalidUsage("--tune: it starts its own ranks for every algorithm; use it without a launcher");
  const auto device = base::open_device(device_of_rank(plan.device));
  const auto world = join(plan, plan.backends.front(), device, std::nullopt);
  const bool first = world->rank() == 0;
  {
    comm::HostCollectives control(*world, *device);
    comm::require_alike(control, shared_settings_of(options, plan), "bench");
  }
  BenchReport report(plan, options.csv);
  if (first) print_now(report.begin());
  run_bench(plan, *world, *device, {.on_message = [&](const ordered_json& message) {
              print_message(report, plan.backends.front(), message, options);
            }});
  if (!first) return 0;
  print_now(report.end());
  finish_bench(options, report);
  if (baseline) check_against(*baseline, options, report);
  return 0;
}

int run_all(const CommandLine& commands, const BenchOptions& options, const BenchSpec& plan,
            const std::optional<BenchFile>& baseline) {
  BenchReport report(plan, options.csv);
  print_now(report.begin());
  for (const std::string& backend : plan.backends) {
    // Results carry the requested names, even if one backend delegates to another.
    const int code = run_ranks(commands, plan, backend, {}, [&](ordered_json message) {
      for (const char* part : {"row", "in_place", "pattern"})
        if (message.contains(part) && (plan.backends.size() > 1 || plan.pattern)) message[part]["backend"] = backend;
      print_message(report, backend, message, options);
    });
    if (code == 0) continue;
    if (report.empty()) return code;
    print_now(report.end());
    write_results(options, report, false);
    return code;
  }
  print_now(report.end());
  finish_bench(options, report);
  if (baseline) check_against(*baseline, options, report);
  return 0;
}

/// Runs the backend's own choice first, then each of its algorithms, in fresh processes.
int tune(const CommandLine& commands, const BenchOptions& options, const BenchSpec& plan) {
  BenchReport report(plan, false);
  AlgorithmTuner tuning(plan);
  print_now(report.begin());
  std::string algorithms;
  int code = 0;
  for (std::size_t run = 0; code == 0 && (run == 0 || !algorithms.empty()); ++run) {
    print_now(fmt::format("# measuring {}\n", run == 0 ? "the backend's own choice" : algorithms));
    code = run_ranks(commands, plan, plan.backends.front(), {"--algorithms", algorithms},
                     [&](const ordered_json& message) {
                       if (message.contains("algorithms")) tuning.set_known(message["algorithms"]);
                       if (message.contains("row")) {
                         const BenchResult result = bench_row_from_json(message).out_of_place;
                         run == 0 ? tuning.add_default(result) : tuning.add(result);
                       }
                       if (message.contains("environment") && run == 0)
                         print_now(report.add(plan.backends.front(), message));
                       if (message.contains("memcpy") || (message.contains("row") && run > 0))
                         report.add(plan.backends.front(), message);
                     });
    algorithms = tuning.round(run);
  }
  if (code != 0) return code;
  const std::string setting =
      fmt::format("tessera bench --tune: backend {}, {} ranks, {} {}, {} memory of {}, TESSERA_DETERMINISTIC={}",
                  plan.backends.front(), plan.ranks, base::name_of(plan.dtype), comm::name_of(plan.redop),
                  plan.communicator_memory ? "communicator" : "ordinary", plan.device,
                  comm_variable("TESSERA_DETERMINISTIC").value_or("0"));
  print_now(tuning.table());
  write_file(options.tune, tuning.file(setting));
  print_now(fmt::format("#\n# {} is written; TESSERA_ALGO=@{} uses it\n", options.tune, options.tune));
  ordered_json json = report.json();
  // Over several algorithms these would mean nothing.
  json["fits"] = json["verdicts"] = ordered_json::array();
  json["tune"] = tuning.json();
  write_json(options.json, json);
  if (const std::string failure = report.failure(); !failure.empty()) throw CheckFailed(failure);
  return 0;
}

std::vector<std::string> options_of_step(const CLI::App& command) {
  std::vector<std::string> names = {"--of-step", "--ranks", "--backends", "--iterations", "--json"};
  for (const CLI::Option* option : command.get_options())
    if (option->get_group() == kStepGroup) names.push_back(option->get_name());
  return names;
}

/// What a pattern measures unless told otherwise: one size, sent.
BenchOptions with_pattern_defaults(const CLI::App& command, BenchOptions options) {
  if (options.only.empty())
    refuse_other_options(
        command, "--pattern",
        {"--pattern", "--outlier",    "ops",      "--ranks",  "--backends", "--min-bytes",  "--max-bytes",
         "--factor",  "--dtype",      "--device", "--op",     "--memory",   "--iterations", "--warmup",
         "--check",   "--time-limit", "--json",   "--report", "--link",     "--link-intra", "--hosts"});
  if (command.count("--max-bytes") == 0 && command.count("--min-bytes") == 0) options.max_bytes = "4M";
  if (command.count("--min-bytes") == 0) options.min_bytes = options.max_bytes;
  const std::string& pattern = options.pattern;
  if ((pattern == "incast" || pattern == "neighbors") && command.count("ops") > 0)
    throw base::InvalidUsage("--pattern " + pattern + " consists of sends; leave the operations out");
  if (std::ranges::find(options.ops, "barrier") != options.ops.end())
    throw base::InvalidUsage("--pattern compares bandwidths, which barrier has none of; leave it out");
  if (command.count("ops") > 0) return options;
  options.pattern_sends = pattern == "incast" || pattern == "pairs" || pattern == "bisection";
  options.ops = {options.pattern_sends ? "gather" : "send_recv"};  // a gather's direct algorithm sends to one rank
  return options;
}

int bench(const CLI::App& command, const CommandLine& commands, BenchOptions options) {
  if (!options.compare.empty()) {
    refuse_other_options(command, "--compare", {"--compare", "--json"});
    return bench_compare(options);
  }
  if (std::ranges::any_of(options.ops, [](const std::string& op) { return op.ends_with(".json"); })) {
    if (options.report.empty())
      throw base::InvalidUsage("bench measures operations, not files; add --report FILE.html to draw results");
    refuse_other_options(command, "--report with files", {"ops", "--report"});
    return bench_report(options);
  }
  if (!options.pattern.empty())
    options = with_pattern_defaults(command, options);
  else if (command.count("--outlier") > 0)
    throw base::InvalidUsage("--outlier has no effect without --pattern; leave it out");
  const int ranks = world_size(options.ranks);
  BenchSpec plan = make_bench_plan(options, ranks);
  plan.command = fmt::format("tessera {}", fmt::join(commands.arguments, " "));
  if (!options.cluster.empty()) {
    if (options.only.empty())
      refuse_other_options(
          command, "--cluster",
          {"--cluster", "--ranks", "--backends", "--min-bytes", "--max-bytes", "--factor", "--iterations", "--warmup"});
    return bench_cluster(commands, options, plan);
  }
  if (options.of_step) {
    if (options.only.empty()) refuse_other_options(command, "--of-step", options_of_step(command));
    return bench_of_step(commands, options, plan);
  }
  for (const CLI::Option* option : command.get_options())
    if (option->get_group() == kStepGroup && option->count() > 0)
      throw base::InvalidUsage(option->get_name() + " has no effect without --of-step; leave it out");
  if (!options.only.empty()) return run_as_child(options, plan);

  const comm::Launch launched = comm::resolve_launch();
  std::optional<BenchFile> baseline;
  if (launched.rank == 0) {
    const std::vector<std::string> inputs(options.baseline.empty() ? 0 : 1, options.baseline);
    check_outputs(
        {{"--json", options.json}, {"--plot", options.plot}, {"--report", options.report}, {"--tune", options.tune}},
        inputs);
    if (!inputs.empty()) baseline = read_baseline(options, plan);
  }
  if (launched.size > 1) return run_here(options, plan, baseline);
  warn_if_alone_under_launcher(ranks);
  return options.tune.empty() ? run_all(commands, options, plan, baseline) : tune(commands, options, plan);
}

}  // namespace

void add_bench(CommandLine& commands) {
  CLI::App* command =
      commands.app.add_subcommand("bench", "measure operations between ranks, in the columns of nccl-tests");
  const auto options = std::make_shared<BenchOptions>();
  add_bench_options(*command, *options);
  command->callback([&commands, command, options] {
    commands.chosen = [&commands, command, options] { return bench(*command, commands, *options); };
  });
}

}  // namespace tessera::tools
