#include "tools/bench/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "tessera/base/cores.h"
#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tools/bench/baseline.h"
#include "tools/bench/memory_bound.h"
#include "tools/cli/machine.h"
#include "tools/cli/output.h"
#include "tools/cli/validators.h"
#include "tools/launch/launcher.h"
#include "tools/launch/ranks.h"

namespace tessera::tools {
namespace {

std::vector<std::string> backends_of(const BenchOptions& options) {
  std::vector<std::string> names = options.spec.backends;
  if (names.empty()) names.push_back(default_backend());
  for (const std::string& name : names) check_backend(name);
  return names;
}

std::string joined(const std::vector<std::string>& names) { return fmt::format("{}", fmt::join(names, ",")); }

void set_sizes(BenchSpec& plan, const BenchOptions& options) {
  plan.min_bytes = base::parse_size(options.min_bytes, "--min-bytes");
  plan.max_bytes = base::parse_size(options.max_bytes, "--max-bytes");
  plan.factor = static_cast<std::uint64_t>(base::parse_integer(options.factor, "--factor", 2, 1 << 20));
  if (plan.min_bytes == 0)
    throw base::InvalidUsage("--min-bytes is 0; sizes are multiplied by --factor, so begin at 1 or more");
  if (plan.min_bytes > plan.max_bytes)
    throw base::InvalidUsage("--min-bytes " + options.min_bytes + " is more than --max-bytes " + options.max_bytes);
}

void set_combinations(BenchSpec& plan, const BenchOptions& options) {
  const std::vector<std::string> redops = options.redops.empty() ? std::vector<std::string>{"sum"} : options.redops;
  for (const std::string& dtype : options.dtypes)
    for (const std::string& redop : redops) {
      const base::DType type = base::parse_dtype(dtype);
      if (type == base::DType::boolean) throw base::InvalidUsage("--dtype bool: bench has numbers; use u8");
      plan.combinations.emplace_back(type, comm::parse_reduce_op(redop));
      if (!comm::is_defined(plan.combinations.back().second, type))
        throw base::InvalidUsage("--op " + redop + " is not defined for --dtype " + dtype);
    }
  std::tie(plan.dtype, plan.redop) = plan.combinations.front();
  if (plan.combinations.size() == 1) return;
  for (const auto& [given, name] : {std::pair(!options.plot.empty(), "--plot"), {!options.tune.empty(), "--tune"}})
    if (given)
      throw base::InvalidUsage(std::string(name) +
                               " is for one --dtype and one --op; give one of each, or leave it out");
}

void set_times(BenchSpec& plan, const BenchOptions& options) {
  const auto seconds = [](const std::string& text, const char* name) {
    return static_cast<double>(base::parse_duration(text, name).count()) * 1e-3;
  };
  if (!options.time_limit.empty()) plan.time_limit = base::parse_duration(options.time_limit, "--time-limit");
  if (options.duration.empty() && !options.endless) {
    for (const auto& [text, name] : {std::pair(options.interval, "--interval"), {options.stall, "--stall"}})
      if (!text.empty())
        throw base::InvalidUsage(std::string(name) + " has no effect without --duration or --endless; leave it out");
    return;
  }
  plan.long_run.emplace();
  if (!options.duration.empty()) plan.long_run->seconds = seconds(options.duration, "--duration");
  if (!options.interval.empty()) plan.long_run->interval_s = seconds(options.interval, "--interval");
  if (!options.stall.empty()) plan.long_run->stall_ms = 1e3 * seconds(options.stall, "--stall");
  if (options.endless && plan.long_run->seconds)
    throw base::InvalidUsage("--endless has no --duration; leave one of them out");
  if (options.endless && plan.backends.size() > 1)
    throw base::InvalidUsage("--endless never comes to a second backend; give one --backend, or a --duration");
  for (const auto& [given, name] :
       {std::pair(options.csv, "--csv"), {plan.cold, "--cold"}, {!options.tune.empty(), "--tune"}})
    if (given) throw base::InvalidUsage(std::string(name) + " is not for --duration and --endless; leave it out");
}

void check_tuning(const BenchOptions& options, const BenchSpec& plan) {
  if (plan.backends.size() != 1)
    throw base::InvalidUsage("--tune: a table is for one backend, not for " + joined(plan.backends) +
                             "; give one --backend");
  if (plan.ranks == 1) throw base::InvalidUsage("--tune needs two ranks or more, not --ranks 1");
  for (const BenchOp* op : plan.ops)
    if (op->unequal)
      throw base::InvalidUsage(
          fmt::format("--tune: {} takes the algorithms of {}; tune that", op->name, comm::name_of(op->kind)));
  for (const auto& [given, name] : {std::pair(!options.plot.empty(), "--plot"),
                                    {!options.report.empty(), "--report"},
                                    {plan.overlap, "--overlap"},
                                    {options.csv, "--csv"}})
    if (given) throw base::InvalidUsage(std::string("--tune prints times by algorithm; leave ") + name + " out");
}

void check_baseline_options(const BenchOptions& options, const BenchSpec& plan) {
  if (options.baseline.empty()) {
    if (!options.max_slowdown.empty())
      throw base::InvalidUsage("--max-slowdown has no effect without --baseline; leave it out, or give the file");
    return;
  }
  parse_slowdown(options.max_slowdown);
  if (!options.tune.empty()) throw base::InvalidUsage("--tune measures no baseline; leave --baseline out");
  if (plan.iterations.value_or(kFewestRounds) < static_cast<int>(kFewestRounds))
    throw base::InvalidUsage(fmt::format("--baseline needs the noise of {} calls or more, not --iterations {}",
                                         kFewestRounds, *plan.iterations));
}

}  // namespace

BenchSpec make_bench_plan(const BenchOptions& options, int ranks) {
  BenchSpec plan = options.spec;
  plan.ranks = ranks;
  plan.links = slow_links_of(options, ranks, plan.device);
  if (!options.pattern.empty()) {
    plan.pattern = parse_pattern(options.pattern, ranks);
    plan.pattern->sends = options.pattern_sends;
  }
  for (const std::string& name : options.ops) plan.ops.push_back(&bench_op(name));
  set_sizes(plan, options);
  set_combinations(plan, options);
  if (!options.redops.empty() && !std::ranges::any_of(plan.ops, &BenchOp::reduces))
    throw base::InvalidUsage("--op " + joined(options.redops) + ": " + joined(options.ops) +
                             " reduces nothing; leave it out");
  if (!options.root.empty()) plan.root = static_cast<int>(base::parse_integer(options.root, "--root", 0, ranks - 1));
  if (!options.root.empty() && !std::ranges::any_of(plan.ops, &BenchOp::rooted))
    throw base::InvalidUsage("--root " + options.root + ": " + joined(options.ops) + " has no root; leave it out");
  if (ranks == 1 && std::ranges::find(plan.ops, comm::OpKind::send, &BenchOp::kind) != plan.ops.end())
    throw base::InvalidUsage(joined(options.ops) + ": messages need two ranks or more, not --ranks 1");
  for (const BenchOp* op : plan.ops)
    if (op->exchange != Exchange::ring) {
      if (ranks % 2 != 0)
        throw base::InvalidUsage(
            fmt::format("{} is between pairs of ranks, not of {}; use an even number of --ranks", op->name, ranks));
      for (const auto& [given, name] : {std::pair(plan.overlap, "--overlap"), {plan.pattern.has_value(), "--pattern"}})
        if (given) throw base::InvalidUsage(fmt::format("{} has no {}; leave it out", op->name, name));
    }
  plan.leave_out_refused = options.algorithms.has_value();
  if (plan.only_nccl_columns && options.csv)
    throw base::InvalidUsage("--nccl-columns is about the table's columns; leave it out with --csv");
  if (plan.cold && !can_evict())
    throw base::InvalidUsage("--cold: programs can't flush this processor's caches; it works on x86-64 and arm64");
  plan.communicator_memory = options.memory == "communicator";
  check_device(plan.device);
  if (base::parse_device(plan.device).type != base::DeviceType::cpu)
    for (const auto& [given, name] : {std::pair(plan.cold, "--cold"), {plan.overlap, "--overlap"}})
      if (given)
        throw base::InvalidUsage(std::string(name) +
                                 " measures the host's caches and cores; leave it out with --device " + plan.device);
  plan.backends = options.only.empty() ? backends_of(options) : std::vector{options.only};
  if (!options.tune.empty()) check_tuning(options, plan);
  check_baseline_options(options, plan);
  set_times(plan, options);
  for (const auto& [given, name] : {std::pair(plan.cold, "--cold, which flushes the caches between calls"),
                                    {plan.long_run.has_value(), "--duration, whose calls are timed one by one"},
                                    {options.per_call, "--per-call"}})
    if (plan.aggregate && given) throw base::InvalidUsage(fmt::format("--aggregate excludes {}", name));
  return plan;
}

namespace {

/// Those of train that change what a step costs, in a group of their own.
void add_options_of_step(CLI::App& command, BenchOptions& options) {
  command.add_flag("--of-step", options.of_step,
                   "time the calls that a training step makes, in their order, with all algorithms of each backend");
  const std::vector<const CLI::Option*> others = std::as_const(command).get_options();
  add_option(command, "--strategy", options.step.strategy, "strategy of the step, as in train", "NAME");
  add_step_options(command, options.step);
  for (CLI::Option* option : command.get_options())
    if (std::find(others.begin(), others.end(), option) == others.end()) option->group(kStepGroup);
}

/// How calls are timed and shown.
void add_timing_options(CLI::App& command, BenchOptions& options) {
  add_option(command, "-n,--iterations", options.spec.iterations,
             "timed calls per size (default: 500 up to 64K, 100 up to 4M, then 20)", whole_number(1, 10'000'000));
  add_option(command, "-w,--warmup", options.spec.warmup, "untimed calls before the timed ones",
             whole_number(0, 10'000'000));
  command.add_flag("-c,--check", options.spec.check,
                   "compare the values of one more call with the expected ones; exit with 1 if one is wrong");
  command.add_flag(
      "--aggregate", options.spec.aggregate,
      "time calls back to back, without a barrier before each, and show their mean, as nccl-tests and OSU's "
      "tests between two ranks do");
  command.add_flag("--per-call", options.per_call,
                   "time each call after a barrier, and show the median (this is the default)");
  command.add_flag("--misaligned", options.spec.misaligned, "buffers that begin one element after an aligned address");
  command.add_flag("--cold", options.spec.cold, "flush the buffers from the caches before each call (default: off)");
  command.add_flag("--overlap", options.spec.overlap,
                   "also measure the percentage of an operation's time that compute hides, as OSU benchmarks do");
  command.add_flag("--csv", options.csv, "print CSV instead of the table");
  command.add_flag("--nccl-columns", options.spec.only_nccl_columns,
                   "print no columns beyond those of nccl-tests, for parsers that count from the right");
}

void add_output_options(CLI::App& command, BenchOptions& options) {
  add_option(command, "--json", options.json, "write the results as JSON", "FILE");
  add_option(command, "--plot", options.plot, "plot time and busbw over size as SVG, a curve per backend", "FILE.svg");
  add_option(command, "--report", options.report,
             "write a page with pictures of the results; with files of --json in place of operations measure nothing, "
             "and lay these over each other",
             "FILE.html");
  add_option(command, "--tune", options.tune,
             "measure all algorithms of the backend and write the best by size for TESSERA_ALGO=@FILE", "FILE");
  add_option(command, "--cluster", options.cluster,
             "measure the collectives and kernels of this machine and write a cluster file for plan --cluster", "FILE");
}

/// Runs that are long, of other shapes, or compared with earlier ones.
void add_other_runs(CLI::App& command, BenchOptions& options) {
  add_option(command, "--duration", options.duration,
             "after the tables go on measuring for so long: a line per minute, percentiles, drift and stalls", "TIME");
  command.add_flag("--endless", options.endless, "the same until Ctrl-C");
  add_option(command, "--interval", options.interval, "time between those lines (default: 1m)", "TIME");
  add_option(command, "--stall", options.stall,
             "record calls that take so much longer than their median (default: 100ms)", "TIME");
  add_option(command, "--time-limit", options.time_limit,
             "fail if a call takes longer, naming the rank that is behind; measure large sizes with fewer calls "
             "(default: TESSERA_TIMEOUT)",
             "TIME");
  add_option(command, "--pattern", options.pattern,
             "measure who talks to whom, and name what is slow: pairs: each pair of hosts, or with one host of ranks, "
             "alone; bisection: disjoint pairs at once; groups=K: K equal groups at once; neighbors: a ring; incast: "
             "all send to one",
             "PATTERN");
  add_option(command, "--outlier", options.spec.outlier,
             "with --pattern: how many deviations below the median a rate is called slow", finite_number(1, 1e6));
  add_option(command, "--compare", options.compare,
             "measure nothing: say what got faster or slower from one file of --json to another, beyond the noise",
             "BEFORE.json AFTER.json")
      ->expected(2);
  add_option(command, "--baseline", options.baseline,
             "compare with a file of --json; exit with 1 if a row is slower than --max-slowdown allows", "FILE.json");
  add_option(command, "--max-slowdown", options.max_slowdown, "what --baseline allows, such as 10% (default: 5%)",
             "PERCENT");
}

}  // namespace

void add_bench_options(CLI::App& command, BenchOptions& options) {
  std::string names;
  for (const BenchOp& op : bench_ops()) names += (names.empty() ? "" : " ") + std::string(op.name);
  add_option(command, "ops", options.ops, "operations, separated by commas: " + names, list_of())
      ->capture_default_str();
  add_option(command, "--ranks", options.ranks, "number of ranks on this host (default: the launcher's, else 4)",
             whole_number(1, 1024));
  add_option(command, "--backends,--backend", options.spec.backends,
             "backends to measure, one after the other (default: TESSERA_BACKEND, else shm)", list_of())
      ->allow_extra_args(false);
  add_option(command, "-b,--min-bytes", options.min_bytes, "smallest total size, such as 8 or 64K", "SIZE");
  add_option(command, "-e,--max-bytes", options.max_bytes, "largest total size", "SIZE");
  add_option(command, "-f,--factor", options.factor, "ratio of each size to the one before", "N");
  add_option(command, "--dtype", options.dtypes,
             "types of the elements, separated by commas: f32 f64 f16 bf16 i8 u8 i16 i32 i64 u32 u64", list_of())
      ->capture_default_str();
  add_device_option(command, options.spec.device);
  add_option(
      command, "--op", options.redops,
      "reductions, separated by commas: sum avg prod min max premul_sum, of integers also bit_and bit_or bit_xor "
      "(default: sum)",
      list_of());
  add_option(command, "--root", options.root, "root of broadcast, reduce, gather and scatter (default: 0)", "RANK");
  add_option(command, "--memory", options.memory,
             "buffers: communicator: allocated by the backend; ordinary: by the caller",
             one_of({"communicator", "ordinary"}));
  add_timing_options(command, options);
  add_output_options(command, options);
  add_other_runs(command, options);
  add_link_options(command, options);
  add_options_of_step(command, options);
  command.add_option("--threads", options.threads)->group("");        // of the ranks that this command starts
  command.add_option("--algorithms", options.algorithms)->group("");  // of the ranks that this command starts
  command.add_option("--only", options.only)->group("");              // of the ranks that this command starts
  command.footer(
      "Columns are those of nccl-tests; a size is the total over ranks, rounded down to what the ranks can share "
      "evenly.\n"
      "Ranks are bound to cores where there is one for each; to leave them free: tessera run --bind none -n N -- "
      "tessera bench ...");
}

int run_ranks(const CommandLine& commands, const BenchSpec& spec, const std::string& backend,
              const std::vector<std::string>& more,
              const std::function<void(const nlohmann::ordered_json&)>& on_message) {
  std::vector<std::string> arguments = commands.arguments;
  arguments.insert(arguments.end(), {"--only", backend});
  arguments.insert(arguments.end(), more.begin(), more.end());
  LaunchSpec ranks = plan_for_this_program(spec.ranks, arguments, backend);
  ranks.bind_to_cores = spec.ranks <= base::usable_cores();
  ranks.on_output = [&](int, std::string_view text) {
    if (const nlohmann::ordered_json message = message_of_rank(text); !message.is_null()) on_message(message);
  };
  return launch(ranks);
}

}  // namespace tessera::tools
