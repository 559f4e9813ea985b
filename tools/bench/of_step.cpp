// tessera bench --of-step: what the calls of a training step cost on each backend.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "tessera/base/error.h"
#include "tessera/comm/launch.h"
#include "tools/bench/machine.h"
#include "tools/bench/options.h"
#include "tools/bench/step_calls.h"
#include "tools/bench/tuner.h"
#include "tools/cli/machine.h"
#include "tools/cli/output.h"
#include "tools/launch/ranks.h"
#include "tools/plan/model_plan.h"
#include "tools/results/statistics.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

constexpr int kIterations = 30;

/// A step whose calls are timed.
struct StepOfModel {
  std::string model;
  std::string strategy;
  int ranks = 1;
  double tokens = 0;  ///< of all ranks
  std::vector<StepCall> calls;
};

/// The measurements of one backend.
struct StepOnBackend {
  std::string backend;
  double compute_ms = 0;  ///< of a step without communication
  StepCallsResult own;    ///< with the backend's own choice of algorithms
  StepCallsResult again;  ///< the same in other processes
  /// By the text of TESSERA_ALGO. The algorithms of a backend that leaves the collectives to its library are not known.
  std::map<std::string, StepCallsResult> by_algorithm;

  /// Call i's shortest time, and its algorithm.
  const StepCallTimes& best(std::size_t i) const {
    const StepCallTimes* best = &own.calls[i];
    for (const auto& [name, result] : by_algorithm)
      if (!result.calls[i].refused() && result.calls[i].us < best->us) best = &result.calls[i];
    return *best;
  }
  /// The sum of the shortest times of the calls, and that of the backend's own choices.
  double best_ms() const {
    double us = 0;
    for (std::size_t i = 0; i < own.calls.size(); ++i) us += best(i).us;
    return us * 1e-3;
  }
  double own_ms() const {
    double us = 0;
    for (const StepCallTimes& call : own.calls) us += call.us;
    return us * 1e-3;
  }
  /// Whether the bits of a result change with the size, the run or the algorithm.
  ordered_json bits_change_with() const {
    bool size = false, run = false, algorithm = false;
    for (std::size_t i = 0; i < own.calls.size(); ++i) {
      const StepCallTimes &first = own.calls[i], &second = again.calls[i];
      size |= !first.same_sizes;
      run |= !first.same_runs || !second.same_runs || first.hash != second.hash;
      for (const auto& [name, result] : by_algorithm)
        algorithm |= !result.calls[i].refused() && result.calls[i].hash != first.hash;
    }
    return {{"size", size}, {"run", run}, {"algorithm", algorithm}};
  }
};

TrainPlan plan_of_step(const BenchOptions& options, int ranks) {
  TrainOptions step{options.step};
  step.steps = 0;  // opens no data
  step.simulated = step.untimed = true;
  return make_plan(step, ranks);
}

StepOfModel step_of_plan(const TrainPlan& plan) {
  const ClusterSpec cluster = cluster_of(PlanOptions{}, plan.ranks);  // its times don't matter
  const StepPlan planned = plan_step(plan, plan.options.strategy, simulate(cluster, plan.ranks));
  StepOfModel step{.model = plan.options.model, .strategy = planned.result.strategy, .ranks = plan.ranks};
  step.tokens = static_cast<double>(plan.options.global_batch * plan.seq_len);
  step.calls = step_calls(planned.transfers, plan.precision.reduce, plan.ranks);
  if (step.calls.empty())
    throw base::InvalidUsage("--of-step: a step of one rank makes no calls; use --ranks 2 or more");
  return step;
}

/// The step of a world of one rank, which computes this rank's part of the batch.
plan::TrainingStep compute_of(const TrainPlan& plan, int threads) {
  plan::TrainingStep step = training_step(plan, {.strategy = fsdp::strategy_named("ddp"),
                                                 .optimizer = plan.options.optimizer_config,
                                                 .reduce_dtype = plan.precision.reduce});
  step.threads = threads;
  return step;
}

/// The median of as many steps as fit into a second, within bounds. Collective.
double compute_ms(const plan::TrainingStep& step, comm::Communicator& alone, comm::HostCollectives& control) {
  constexpr int kFewest = 3, kMost = 100;
  const double once = median(time_steps(step, alone, control, kFewest, nullptr));
  const int steps = std::clamp(static_cast<int>(1 / std::max(once, 1e-6)), kFewest, kMost);
  return 1e3 * median(time_steps(step, alone, control, steps, nullptr));
}

/// As a rank that this tool started.
int measure_as_child(const BenchOptions& options, const BenchSpec& spec) {
  const TrainPlan plan = plan_of_step(options, spec.ranks);
  const StepOfModel step = step_of_plan(plan);
  const auto world = init_world({.ranks = spec.ranks,
                                 .backend = options.only,
                                 .algorithms = options.algorithms.value_or(""),
                                 .memory_tracker = std::make_shared<base::MemoryTracker>()});
  ordered_json line = {{"algorithms", world->capabilities().algorithms}};
  if (!options.algorithms) {
    const std::shared_ptr<base::DeviceRuntime> device = base::open_device({});
    comm::HostCollectives control(*world, *device);
    const std::unique_ptr<comm::Communicator> alone = world->split(world->rank(), 0);
    line["compute_ms"] = compute_ms(compute_of(plan, options.threads.value_or(1)), *alone, control);
  }
  const StepCallsResult result = time_step_calls(step.calls, *world, spec.iterations.value_or(kIterations));
  line["total_ms"] = result.total_ms;
  for (const StepCallTimes& call : result.calls) line["calls"].push_back(to_json(call));
  if (world->rank() == 0) print_json(line);
  return 0;
}

/// Runs the ranks of one measurement. Returns the exit code.
int run_ranks_of(const CommandLine& commands, const BenchSpec& spec, const std::string& backend,
                 const std::optional<std::string>& algorithms, ordered_json& result) {
  const int cores = static_cast<int>(allowed_cores().size());
  std::vector<std::string> more = {"--threads", std::to_string(std::max(1, cores / spec.ranks))};
  if (algorithms) more.insert(more.end(), {"--algorithms", *algorithms});
  return run_ranks(commands, spec, backend, more, [&](const ordered_json& line) { result = line; });
}

StepCallsResult result_of(const ordered_json& json) {
  StepCallsResult result{.calls = {}, .total_ms = json.at("total_ms")};
  for (const ordered_json& call : json.at("calls")) result.calls.push_back(step_call_times_from_json(call));
  return result;
}

/// All measurements of one backend. Returns the exit code.
int measure_backend(const CommandLine& commands, const BenchSpec& spec, const StepOfModel& step, StepOnBackend& on) {
  ordered_json line;
  int code = run_ranks_of(commands, spec, on.backend, std::nullopt, line);
  if (code != 0) return code;
  on.own = result_of(line);
  on.compute_ms = line.at("compute_ms");
  const auto known = line.at("algorithms").get<std::vector<std::string>>();
  code = run_ranks_of(commands, spec, on.backend, "", line);
  if (code != 0) return code;
  on.again = result_of(line);
  std::vector<comm::OpKind> operations;
  for (const StepCall& call : step.calls)
    if (std::ranges::find(operations, call.op->kind) == operations.end()) operations.push_back(call.op->kind);
  std::string algorithms;
  for (std::size_t i = 0; !(algorithms = algorithms_of_round(operations, known, i)).empty(); ++i) {
    code = run_ranks_of(commands, spec, on.backend, algorithms, line);
    if (code != 0) return code;
    on.by_algorithm[algorithms] = result_of(line);
  }
  return 0;
}

double tokens_per_second(const StepOfModel& step, double ms) { return ms > 0 ? step.tokens / ms * 1e3 : 0; }

ordered_json calls_json(const StepOfModel& step, const StepOnBackend& on) {
  ordered_json calls = ordered_json::array();
  for (std::size_t i = 0; i < step.calls.size(); ++i)
    calls.push_back({{"op", step.calls[i].op->name},
                     {"bytes", step.calls[i].bytes},
                     {"ranks", step.calls[i].members.ranks},
                     {"us", on.own.calls[i].us},
                     {"algorithm", on.own.calls[i].algorithm},
                     {"best_us", on.best(i).us},
                     {"best_algorithm", on.best(i).algorithm}});
  return calls;
}

ordered_json to_json(const StepOfModel& step, const std::vector<StepOnBackend>& backends) {
  ordered_json all = ordered_json::array();
  for (const StepOnBackend& on : backends)
    all.push_back({{"backend", on.backend},
                   {"total_ms", on.own.total_ms},
                   {"compute_ms", on.compute_ms},
                   {"tokens_per_second", tokens_per_second(step, on.compute_ms + on.own.total_ms)},
                   {"tokens_per_second_hidden", tokens_per_second(step, std::max(on.compute_ms, on.own.total_ms))},
                   {"calls_ms", on.own_ms()},
                   {"best_ms", on.best_ms()},
                   {"bits_change_with", on.bits_change_with()},
                   {"calls", calls_json(step, on)}});
  return {{"model", step.model},
          {"strategy", step.strategy},
          {"ranks", step.ranks},
          {"tokens", step.tokens},
          {"backends", all}};
}

/// The operations of the step whose best algorithm is another than the backend's choice.
std::string better_algorithms(const StepOfModel& step, const StepOnBackend& on) {
  std::string text;
  for (std::size_t i = 0; i < step.calls.size(); ++i) {
    const StepCallTimes& own = on.own.calls[i];
    const StepCallTimes& best = on.best(i);
    if (best.algorithm == own.algorithm || best.us > 0.9 * own.us) continue;
    const std::string line = fmt::format("#   {} of {} bytes: {} takes {:.1f} us, {} {:.1f}\n", step.calls[i].op->name,
                                         step.calls[i].bytes, own.algorithm, own.us, best.algorithm, best.us);
    if (text.find(line) == std::string::npos) text += line;
  }
  return text;
}

std::string changes_text(const StepOnBackend& on) {
  std::vector<std::string> with;
  const ordered_json changes = on.bits_change_with();
  for (const auto& [what, it_does] : changes.items())
    if (it_does.get<bool>()) with.push_back(what);
  return with.empty() ? "nothing" : fmt::format("{}", fmt::join(with, ","));
}

std::string to_text(const StepOfModel& step, const std::vector<StepOnBackend>& backends) {
  std::string text = fmt::format(
      "# {} under {}, {} ranks: {} calls in a step of {:.0f} tokens, one after the other; medians of the slowest rank\n"
      "#\n#{:>8}  {:>10}  {:>10}  {:>9}  {:>13}  {:>13}  {:>10}  {:>10}  {}\n",
      step.model, step.strategy, step.ranks, step.calls.size(), step.tokens, "backend", "calls ms", "compute ms",
      "% of step", "tokens/s", "all hidden", "sum ms", "best ms", "bits change with");
  for (const StepOnBackend& on : backends) {
    const double ms = on.own.total_ms;
    text += fmt::format(
        "{:>9}  {:>10.3f}  {:>10.3f}  {:>9.1f}  {:>13.0f}  {:>13.0f}  {:>10.3f}  {:>10.3f}  {}\n", on.backend, ms,
        on.compute_ms, 100 * ms / (ms + on.compute_ms), tokens_per_second(step, ms + on.compute_ms),
        tokens_per_second(step, std::max(ms, on.compute_ms)), on.own_ms(), on.best_ms(), changes_text(on));
    text += better_algorithms(step, on);
  }
  return text;
}

}  // namespace

int bench_of_step(const CommandLine& commands, const BenchOptions& options, const BenchSpec& spec) {
  if (!options.only.empty()) return measure_as_child(options, spec);
  if (comm::resolve_launch().size > 1)
    throw base::InvalidUsage("--of-step: it starts its own ranks for every algorithm; use it without a launcher");
  check_outputs({{"--json", options.json}}, {options.step.model});
  warn_ineffective_options(options.step, {options.step.strategy});
  const StepOfModel step = step_of_plan(plan_of_step(options, spec.ranks));
  std::vector<StepOnBackend> backends;
  for (const std::string& backend : spec.backends) {
    backends.push_back({.backend = backend, .own = {}, .again = {}, .by_algorithm = {}});
    if (const int code = measure_backend(commands, spec, step, backends.back()); code != 0) return code;
  }
  print_clean("{}", to_text(step, backends));
  write_json(options.json, {{"ranks", spec.ranks}, {"of_step", to_json(step, backends)}});
  return 0;
}

}  // namespace tessera::tools
