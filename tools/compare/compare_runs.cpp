#include "tools/compare/compare.h"

#include <fmt/format.h>

#include <functional>
#include <memory>

#include "tools/cli/output.h"
#include "tools/launch/launcher.h"
#include "tools/launch/ranks.h"
#include "tools/results/rounds.h"
#include "tools/train/step_progress.h"
#include "tools/train/trainer.h"

namespace tessera::tools {

using nlohmann::ordered_json;

namespace {

/// Runs as one of the ranks. Under another launcher the same processes run all strategies, each in a world of its own:
/// `generation` counts them.
CompareRun run_here(const TrainPlan& plan, const std::string& strategy, int generation,
                    const std::function<void(const StepReport&)>& on_step) {
  const auto memory_tracker = std::make_shared<base::MemoryTracker>();
  WorldInitOptions options = world_of(plan, memory_tracker);
  options.algorithms = kComparedAlgorithms;
  options.generation = generation;
  options.ordered = true;
  const auto world = init_world(options);
  const TrainingOutcome outcome =
      run_training(plan, strategy, *world, memory_tracker, {.on_step = on_step, .measure_norm = false});
  return {outcome.result, plan.options.trace.empty() ? "" : chrome_trace(outcome.last_step),
          std::string(world->backend())};
}

/// Starts fresh ranks for one run. Returns the exit code; on 0 it has filled `run`. `prefix`: of the progress line.
int run_in_processes(const CommandLine& commands, const CompareOptions& options, const PlannedRun& contestant,
                     const std::string& prefix, CompareRun& run) {
  const TrainPlan& plan = contestant.plan;
  std::vector<std::string> arguments = commands.arguments;
  arguments.insert(arguments.end(), {"--only", contestant.strategy});
  if (!options.wraps.empty()) arguments.insert(arguments.end(), {"--only-wrap", plan.options.wrap});
  LaunchSpec launch_plan = training_launch_spec(plan, std::move(arguments));
  ProgressLine progress(prefix + contestant.strategy + " ");
  launch_plan.progress = &progress;
  launch_plan.on_output = [&](int, std::string_view line) {
    const ordered_json message = message_of_rank(line);
    if (message.is_null()) return;
    const nlohmann::json result = message["result"];
    run.result = parse_run_result({result, "the result of a rank"});
    run.trace = message["trace"];
    run.backend = message["backend"];
  };
  return launch(launch_plan);
}

}  // namespace

int run_as_child(const TrainPlan& plan, const CompareOptions& options) {
  bool first = false;
  StepProgress progress(plan);
  const CompareRun run = run_here(plan, options.only, 0, [&](const StepReport& step) {
    first = true;
    print_progress(progress.text_after(step));
  });
  if (first) {
    const ordered_json line = {{"result", to_json(run.result)}, {"trace", run.trace}, {"backend", run.backend}};
    print_json(line);
  }
  return 0;
}

int run_rounds(const CommandLine& commands, const CompareOptions& options, const std::vector<PlannedRun>& contestants,
               int ranks, std::vector<std::vector<CompareRun>>& results) {
  const bool in_processes = must_spawn(ranks) || ranks == 1;
  int generation = 0;
  results.resize(contestants.size());
  for (std::size_t round = 0; round < options.rounds(); ++round)
    for (const std::size_t i : round_order(round, contestants.size())) {
      const PlannedRun& contestant = contestants[i];
      CompareRun run;
      if (in_processes) {
        const std::string prefix = options.rounds() > 1 ? fmt::format("round {}/{} ", round + 1, options.rounds()) : "";
        const int code = run_in_processes(commands, options, contestant, prefix, run);
        if (code != 0) return code;
      } else {
        run = run_here(contestant.plan, contestant.strategy, generation++, {});
      }
      if (!options.wraps.empty()) run.result.wrap = contestant.plan.options.wrap;
      results[i].push_back(std::move(run));
    }
  return 0;
}

}  // namespace tessera::tools
