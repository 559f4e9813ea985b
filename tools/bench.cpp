// tessera bench: how long collectives take, and whether they are right.
#include "tools/bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/comm/context.h"
#include "tessera/comm/launch.h"
#include "tessera/comm/registry.h"
#include "tools/commands.h"
#include "tools/launcher.h"
#include "tools/output.h"
#include "tools/process.h"
#include "tools/ranks.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

/// comm's variable of that name. Throws nothing: an unknown name has no value.
std::optional<std::string> variable(std::string_view name) {
  for (const base::EnvVariable& known : comm::variables())
    if (known.name == name) return base::read_env(known);
  return std::nullopt;
}

std::vector<std::string> backends_of(const BenchOptions& options) {
  std::vector<std::string> names = options.backends;
  if (names.empty()) names.push_back(variable("TESSERA_BACKEND").value_or("shm"));
  for (const std::string& name : names) comm::find_backend(name);
  return names;
}

template <class Fits>
bool any_of(const BenchPlan& plan, Fits&& fits) {
  return std::any_of(plan.ops.begin(), plan.ops.end(), [&](const BenchOp* op) { return fits(*op); });
}

std::string joined(const std::vector<std::string>& names) { return fmt::format("{}", fmt::join(names, ",")); }

void set_sizes(BenchPlan& plan, const BenchOptions& options) {
  plan.min_bytes = base::parse_size(options.min_bytes, "--min-bytes");
  plan.max_bytes = base::parse_size(options.max_bytes, "--max-bytes");
  plan.factor = static_cast<std::uint64_t>(base::parse_integer(options.factor, "--factor", 2, 1 << 20));
  if (plan.min_bytes == 0)
    throw base::InvalidUsage("--min-bytes is 0; sizes are multiplied by --factor, so begin at 1 or more");
  if (plan.min_bytes > plan.max_bytes)
    throw base::InvalidUsage("--min-bytes " + options.min_bytes + " is more than --max-bytes " + options.max_bytes);
}

void print(const std::string& text) {
  fmt::print("{}", text);
  std::fflush(stdout);
}

/// The communicator of all ranks. Unlike in training, sums may be added in any order unless the environment asks for
/// one.
std::unique_ptr<comm::Communicator> join(const BenchPlan& plan, const std::string& backend) {
  comm::Config config;
  config.backend = backend;
  if (plan.ranks == 1) config.launch = comm::Launch{};
  if (!variable("TESSERA_DETERMINISTIC")) config.deterministic = false;
  return comm::init(std::move(config));
}

/// As a rank of ours: tells the process that started it, a line of JSON each.
int run_as_child(const BenchPlan& plan, const std::string& backend) {
  const auto tell = [](const ordered_json& line) { print(line.dump() + "\n"); };
  const auto world = join(plan, backend);
  run_bench(plan, *world,
            {.on_memcpy =
                 [&](const MemcpySpeed& speed) {
                   tell({{"memcpy", {speed.one_core, speed.all_ranks}}});
                 },
             .on_row =
                 [&](const BenchRow& row) {
                   ordered_json line = {{"row", to_json(row.out_of_place)}};
                   if (row.in_place) line["in_place"] = to_json(*row.in_place);
                   tell(line);
                 }});
  return 0;
}

int run_in_processes(const Commands& commands, const BenchPlan& plan, const std::string& backend, BenchReport& report) {
  std::vector<std::string> arguments = commands.arguments;
  arguments.insert(arguments.end(), {"--only", backend});
  LaunchPlan launch_plan = plan_for_this_program(plan.ranks, arguments);
  // Ranks that the scheduler put on one core and leaves there wait for each other's time slices: another thing than the
  // transport.
  launch_plan.bind_to_cores = static_cast<std::size_t>(plan.ranks) <= allowed_cores().size();
  launch_plan.on_output = [&](int, std::string_view text) {
    const ordered_json line = ordered_json::parse(text);
    if (line.contains("memcpy")) return print(report.add(MemcpySpeed{line["memcpy"][0], line["memcpy"][1]}));
    BenchRow row{bench_result_from_json(line.at("row")), {}};
    if (line.contains("in_place")) row.in_place = bench_result_from_json(line["in_place"]);
    print(report.add(row));
  };
  return launch(launch_plan);
}

/// As a rank that another launcher started.
int run_here(const BenchOptions& options, const BenchPlan& plan) {
  if (plan.backends.size() > 1)
    throw base::InvalidUsage("--backends " + joined(plan.backends) +
                             ": under a launcher one run has one backend; start it once for each");
  const auto world = join(plan, plan.backends.front());
  const bool first = world->rank() == 0;
  BenchReport report(plan, options.csv);
  if (first) print(report.begin());
  run_bench(plan, *world,
            {.on_memcpy = [&](const MemcpySpeed& speed) { print(report.add(speed)); },
             .on_row = [&](const BenchRow& row) { print(report.add(row)); }});
  if (!first) return 0;
  print(report.end());
  finish_bench(options, report);
  return 0;
}

int bench(const Commands& commands, const BenchOptions& options) {
  const int ranks = world_size(options.ranks);
  const BenchPlan plan = make_bench_plan(options, ranks);
  if (!options.only.empty()) return run_as_child(plan, options.only);

  const comm::Launch launched = comm::resolve_launch();
  if (launched.rank == 0) check_writable("--json", options.json);
  if (launched.size > 1) return run_here(options, plan);
  if (launched.launcher != "none" && ranks > 1)
    fmt::print(stderr, "tessera: note: {} started one rank; starting {} here\n", launched.launcher, ranks);

  BenchReport report(plan, options.csv);
  print(report.begin());
  for (const std::string& backend : plan.backends) {
    const int code = run_in_processes(commands, plan, backend, report);
    if (code != 0) return code;
  }
  print(report.end());
  finish_bench(options, report);
  return 0;
}

void add_options(CLI::App& command, BenchOptions& options) {
  std::string names;
  for (const BenchOp& op : bench_ops()) names += (names.empty() ? "" : " ") + std::string(op.name);
  command.add_option("ops", options.ops, "operations, separated by commas: " + names)
      ->type_name("A,B")
      ->delimiter(',')
      ->capture_default_str();
  command.add_option("--ranks", options.ranks, "how many processes on this host (default: the launcher's, else 4)")
      ->check(CLI::Range(1, 1024));
  command
      .add_option("--backends,--backend", options.backends,
                  "which to measure, one after the other (default: TESSERA_BACKEND, else shm)")
      ->type_name("A,B")
      ->delimiter(',')
      ->allow_extra_args(false);
  command.add_option("--min-bytes", options.min_bytes, "the smallest total size, such as 8 or 64K")
      ->type_name("SIZE")
      ->capture_default_str();
  command.add_option("--max-bytes", options.max_bytes, "the largest")->type_name("SIZE")->capture_default_str();
  command.add_option("--factor", options.factor, "each size is the one before times this")
      ->type_name("N")
      ->capture_default_str();
  command.add_option("--dtype", options.dtype, "f32 f64 f16 bf16 i8 u8 i32 i64 u32 u64")->capture_default_str();
  command.add_option("--op", options.op, "how values are reduced: sum avg prod min max premul_sum (default: sum)");
  command.add_option("--root", options.root, "the root of broadcast, reduce, gather and scatter (default: 0)")
      ->type_name("RANK");
  command
      .add_option("--memory", options.memory, "communicator: what the backend moves fastest; ordinary: the C library's")
      ->check(CLI::IsMember({"communicator", "ordinary"}))
      ->capture_default_str();
  command
      .add_option("--iterations", options.iterations,
                  "timed calls per size (default: 500 up to 64K, 100 up to 4M, then 20)")
      ->check(CLI::Range(1, 10'000'000));
  command.add_option("--warmup", options.warmup, "calls before them")
      ->check(CLI::Range(0, 10'000'000))
      ->capture_default_str();
  command.add_flag("--check", options.check,
                   "compare every value of one more call with the expected ones; a wrong one ends with code 1");
  command.add_flag("--csv", options.csv, "print CSV instead of the table");
  command.add_option("--json", options.json, "write the results for programs")->type_name("FILE");
  command.add_option("--only", options.only)->group("");  // of the ranks that this command starts
  command.footer(
      "Columns are those of nccl-tests; a size is the total over ranks, rounded down to what the ranks can share "
      "evenly.\n"
      "Ranks are bound to cores where there is one for each; to leave them free: tessera run --bind none -n N -- "
      "tessera bench ...");
}

}  // namespace

BenchPlan make_bench_plan(const BenchOptions& options, int ranks) {
  BenchPlan plan{.ranks = ranks, .check = options.check, .iterations = options.iterations, .warmup = options.warmup};
  for (const std::string& name : options.ops) plan.ops.push_back(&bench_op(name));
  set_sizes(plan, options);
  plan.dtype = base::parse_dtype(options.dtype);
  if (!options.op.empty()) plan.redop = comm::parse_reduce_op(options.op);
  if (!options.op.empty() && !any_of(plan, [](const BenchOp& op) { return op.reduces; }))
    throw base::InvalidUsage("--op " + options.op + ": " + joined(options.ops) + " reduces nothing; leave it out");
  if (!options.root.empty()) plan.root = static_cast<int>(base::parse_integer(options.root, "--root", 0, ranks - 1));
  if (!options.root.empty() && !any_of(plan, [](const BenchOp& op) { return op.rooted; }))
    throw base::InvalidUsage("--root " + options.root + ": " + joined(options.ops) + " has no root; leave it out");
  if (ranks == 1 && any_of(plan, [](const BenchOp& op) { return op.id == BenchOp::Id::send_recv; }))
    throw base::InvalidUsage("send_recv needs two ranks or more, not --ranks 1");
  plan.communicator_memory = options.memory == "communicator";
  plan.backends = options.only.empty() ? backends_of(options) : std::vector{options.only};
  return plan;
}

void finish_bench(const BenchOptions& options, const BenchReport& report) {
  if (!options.json.empty()) write_file(options.json, report.json().dump(1) + "\n");
  if (const std::string failure = report.failure(); !failure.empty()) throw CheckFailed(failure);
}

void add_bench(Commands& commands) {
  CLI::App* command =
      commands.app.add_subcommand("bench", "time the operations between ranks, in the columns of nccl-tests");
  const auto options = std::make_shared<BenchOptions>();
  add_options(*command, *options);
  command->callback(
      [&commands, options] { commands.chosen = [&commands, options] { return bench(commands, *options); }; });
}

}  // namespace tessera::tools
